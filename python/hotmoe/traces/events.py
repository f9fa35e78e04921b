"""From rows to events: what a cache sees.

An event is what one layer needs at once, and it is atomic. A generated token is one event per layer. A prompt is one, too, if it
is looked at as a whole (`group="turn"`): its distinct experts in the order of their first use. The engine cuts a prompt into
ubatches and has one event for each of them and each layer (`group="ubatch"`), which a trace can tell if it has the column `step`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .trace import Trace

GROUPS = ("turn", "ubatch")


@dataclasses.dataclass(frozen=True, eq=False)
class Events:
    """Events of a trace, n of them, in the order in which they happen.

    Attributes:
        bank: int32 [n], index into the trace's banks.
        phase: int32 [n], DECODE or PREFILL, by what was prompt and what was generated.
        engine_phase: int32 [n], the same by the size of the ubatch, as the engine's policies are told.
        n_tokens: int32 [n], of the ubatch.
        n_rows: int32 [n], of them those that this layer computed.
        step: uint64 [n], number of the ubatch.
        generated: int64 [n], how many tokens were generated before this event, of all prompts together.
        offsets: int64 [n + 1], where each event's experts begin.
        experts: int32 [m], ids within the bank; an event of several tokens has some more than once.
        weights: float32 [m], NaN where unknown, or None.
        n_decode_tokens: Tokens generated.
        n_prefill_tokens: Tokens of prompts.
    """

    bank: npt.NDArray[np.int32]
    phase: npt.NDArray[np.int32]
    engine_phase: npt.NDArray[np.int32]
    n_tokens: npt.NDArray[np.int32]
    n_rows: npt.NDArray[np.int32]
    step: npt.NDArray[np.uint64]
    generated: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    experts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None
    n_decode_tokens: int
    n_prefill_tokens: int

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.bank)

    @classmethod
    def of(cls, trace: Trace, group: str = "turn") -> Events:
        """Return the events of a trace.

        Args:
            trace: The trace.
            group: "turn": a turn's prompt is one event per layer. "ubatch": as the engine had it.

        Raises:
            ArgumentError: If `group` is another word, or "ubatch" and the trace does not tell its ubatches.
        """
        from .trace import DECODE, PREFILL

        if group not in GROUPS:
            raise ArgumentError(f"group={group!r}: it must be one of {', '.join(GROUPS)}")
        if group == "ubatch" and trace.step is None:
            raise ArgumentError(f"{trace.name} has no column `step`, which tells its ubatches: replay prompts by turn")

        begins = np.zeros(len(trace), dtype=bool)  # of a step
        begins[:1] = True
        for column in (trace.prompt, trace.turn, trace.phase):
            begins[1:] |= column[1:] != column[:-1]
        if group == "ubatch":
            assert trace.step is not None
            begins[1:] |= trace.step[1:] != trace.step[:-1]
        else:
            begins[1:] |= (trace.token[1:] != trace.token[:-1]) & (trace.phase[1:] == DECODE)
        step_of_row = np.cumsum(begins) - 1

        key = step_of_row * max(len(trace.banks), 1) + trace.bank_index
        order = np.argsort(key, kind="stable")
        first_of_event = np.flatnonzero(np.diff(key[order], prepend=-1))
        n_rows = np.diff(first_of_event, append=len(trace)).astype(np.int32)
        rows = order[first_of_event]

        step_of_event = step_of_row[rows]
        n_steps = int(begins.sum())
        tokens_of_step = np.zeros(n_steps, dtype=np.int32)
        np.maximum.at(tokens_of_step, step_of_event, n_rows)
        phase_of_step = trace.phase[np.flatnonzero(begins)]
        generated_in_step = np.where(phase_of_step == DECODE, tokens_of_step, 0).astype(np.int64)
        n_tokens = tokens_of_step[step_of_event]
        phase = trace.phase[rows].astype(np.int32)

        used = trace.experts[order] >= 0
        lengths = np.count_nonzero(used, axis=1)
        row_offsets = np.concatenate([[0], np.cumsum(lengths)])
        weights = None if trace.weights is None else np.ascontiguousarray(trace.weights[order][used])
        return cls(
            bank=trace.bank_index[rows],
            phase=phase,
            engine_phase=np.where((phase == PREFILL) & (n_tokens > 1), PREFILL, DECODE).astype(np.int32),
            n_tokens=n_tokens,
            n_rows=n_rows,
            step=(trace.step[rows] if group == "ubatch" and trace.step is not None else step_of_event + 1).astype(np.uint64),
            generated=(np.cumsum(generated_in_step) - generated_in_step)[step_of_event],
            offsets=np.append(row_offsets[first_of_event], row_offsets[-1]).astype(np.int64),
            experts=np.ascontiguousarray(trace.experts[order][used]),
            weights=weights,
            n_decode_tokens=int(generated_in_step.sum()),
            n_prefill_tokens=int(tokens_of_step.sum() - generated_in_step.sum()),
        )

    def where(self, which: npt.NDArray[np.bool_]) -> Events:
        """Return some of the events."""
        lengths = np.diff(self.offsets)
        keep = np.repeat(which, lengths)
        return dataclasses.replace(
            self,
            **{
                name: getattr(self, name)[which]
                for name in ("bank", "phase", "engine_phase", "n_tokens", "n_rows", "step", "generated")
            },
            offsets=np.concatenate([[0], np.cumsum(lengths[which])]).astype(np.int64),
            experts=self.experts[keep],
            weights=None if self.weights is None else self.weights[keep],
        )
