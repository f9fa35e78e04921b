"""From what the C side recorded to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._binding import check, ffi, lib
from ..plan import PlanBank
from .files import padded
from .trace import Trace, TraceBank

# struct hotmoe_trace_event
_EVENT = np.dtype(
    [("step", np.uint64)] + [(name, np.int32) for name in ("layer", "bank", "phase", "n_tokens", "n_used", "has_weights")]
)


def take_trace(cache: Any, banks: Sequence[PlanBank]) -> Trace:
    """Take what a `struct hotmoe_cache *` recorded.

    Args:
        cache: The pointer.
        banks: The banks of its plan.

    Returns:
        A trace of one prompt and turn, with phases by the size of the ubatch and tokens numbered from 0.
    """
    assert ffi.sizeof("struct hotmoe_trace_event") == _EVENT.itemsize
    sizes = ffi.new("int64_t[2]")
    check(lib.hotmoe_trace_size(cache, sizes, sizes + 1))
    n_events, n_ids = sizes
    events = np.empty(n_events, dtype=_EVENT)
    ids = np.empty(n_ids, dtype=np.int32)
    weights = np.empty(n_ids, dtype=np.float32)
    check(
        lib.hotmoe_trace_take(
            cache,
            ffi.from_buffer("struct hotmoe_trace_event[]", events, require_writable=True),
            n_events,
            ffi.from_buffer("int32_t[]", ids, require_writable=True),
            ffi.from_buffer("float[]", weights, require_writable=True),
            n_ids,
        )
    )

    n_rows = events["n_tokens"]
    event_of_row = np.repeat(np.arange(n_events), n_rows)
    rows = events[event_of_row]
    row_in_event = np.arange(len(rows)) - np.repeat(np.cumsum(n_rows) - n_rows, n_rows)

    # a layer that computed fewer tokens than others of its ubatch computed the last ones, as `Llama` asks for outputs
    _, step = np.unique(rows["step"], return_inverse=True)
    tokens_of_step = np.zeros(int(step.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(tokens_of_step, step, rows["n_tokens"])
    first_of_step = np.cumsum(tokens_of_step) - tokens_of_step
    token = first_of_step[step] + tokens_of_step[step] - rows["n_tokens"] + row_in_event

    order = np.lexsort((rows["bank"], rows["layer"], token))  # token after token, as a trace has it
    rows, n_used = rows[order], rows["n_used"].astype(np.int64)
    experts, values = padded(ids, n_used, -1, np.int32)[order], padded(weights, n_used, np.nan, np.float32)[order]
    return Trace(
        phase=rows["phase"].astype(np.uint8),
        token=token[order],
        layer=rows["layer"],
        bank=rows["bank"],
        step=rows["step"].astype(np.int64),
        experts=experts,
        weights=None if np.isnan(values).all() else values,
        banks=tuple(TraceBank(bank.layer, bank.bank, bank.n_expert, bank.expert_bytes) for bank in banks),
    )
