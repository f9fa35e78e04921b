"""Lets the C side call tier managers that are written in Python; how exceptions travel is told in `_bridge`.

One `TierBound` stands between one `struct hotmoe_tier_manager` and one Python object, which serves all banks of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ._binding import ffi, lib
from ._bridge import _PHASES, Source, _call, _on_stray
from .errors import PolicyError
from .tiers import EXPERT, TierBank

__all__ = ["TierSource"]

_ADVICE = {"willneed": lib.HOTMOE_TIER_WILLNEED, "dontneed": lib.HOTMOE_TIER_DONTNEED}
_REQUEST_BYTES = ffi.sizeof("struct hotmoe_tier_request")

if ffi.sizeof("struct hotmoe_tier_expert") != EXPERT.itemsize or ffi.offsetof("struct hotmoe_tier_expert", "entered") != 12:
    raise ImportError("struct hotmoe_tier_expert is not laid out as hotmoe.tiers.EXPERT says")


class TierSource(Source):
    """A Python tier manager of one cache."""

    def bound(self, config: Any) -> Any:
        """Return the object at work for what config describes."""
        return TierBound(self, config)


class TierBound:
    """A Python tier manager at work."""

    def __init__(self, source: Source, config: Any) -> None:
        """Tell the object of its banks; config is a const struct hotmoe_tier_config *."""
        self.source = source
        self.failed = False
        rows = (config.banks[i] for i in range(config.n_banks))
        banks = [TierBank(b.layer, b.bank, b.n_expert, b.host_slots, b.expert_bytes) for b in rows]
        self.source.policy.setup(banks)

    def on_step(self, step: Any, requests: Any, room: int, n: Any) -> None:
        """Ask what is to be done, and write it; n is an int32_t *.

        Raises:
            PolicyError: If the answer cannot be understood.
        """
        used, dropped = _view(step.used, step.n_used), _view(step.dropped, step.n_dropped)
        answer = self.source.policy.on_step(used, dropped, step=step.step, phase=_PHASES[step.phase], n_tokens=step.n_tokens)
        rows = self._rows(answer)
        if len(rows) > room:
            raise PolicyError(f"{self.source.label}.on_step asked for {len(rows)} things at once, {room} is the limit")
        ffi.memmove(requests, np.ascontiguousarray(rows, np.int32), len(rows) * _REQUEST_BYTES)
        n[0] = len(rows)

    def _rows(self, answer: Any) -> npt.NDArray[np.int32]:
        """Return an answer as struct hotmoe_tier_request, int32 [n, 4]."""
        if answer is None:
            return np.empty((0, 4), np.int32)
        if not isinstance(answer, Mapping) or not all(key in _ADVICE for key in answer):
            self._refuse(answer, "a mapping with the keys 'willneed' and 'dontneed', or None, was asked for")
        parts = [np.empty((0, 4), np.int32)]
        for key, experts in answer.items():
            columns = self._columns(experts)
            part = np.full((len(columns), 4), _ADVICE[key], np.int32)
            part[:, :3] = columns
            parts.append(part)
        return np.concatenate(parts)

    def _columns(self, experts: Any) -> npt.NDArray[np.int32]:
        """Return experts as int32 [n, 3]: layer, bank, expert."""
        names = getattr(getattr(experts, "dtype", None), "names", None)
        if names:
            if not {"layer", "bank", "expert"} <= set(names) or experts.ndim != 1:
                self._refuse(experts, "an array [n] with the fields layer, bank and expert was asked for")
            return np.stack([experts[name] for name in ("layer", "bank", "expert")], axis=1).astype(np.int32)
        try:
            table = np.array(list(experts))
        except (TypeError, ValueError):
            self._refuse(experts, "a list of (layer, expert) or (layer, bank, expert) was asked for")
        if len(table) == 0:
            return np.empty((0, 3), np.int32)
        limit = np.iinfo(np.int32)
        if table.ndim != 2 or table.shape[1] not in (2, 3) or table.dtype.kind not in "iu":
            self._refuse(experts, "a list of (layer, expert) or (layer, bank, expert) was asked for")
        if table.min() < limit.min or table.max() > limit.max:
            self._refuse(experts, "an id has more than 32 bits")
        if table.shape[1] == 2:
            table = np.insert(table, 1, 0, axis=1)
        return table.astype(np.int32)

    def _refuse(self, answer: object, wanted: str) -> None:
        raise PolicyError(f"{self.source.label}.on_step answered {answer!r}: {wanted}")

    def reset(self) -> None:
        """Make the object forget."""
        self.source.policy.reset()


def _view(pointer: Any, n: int) -> npt.NDArray[Any]:
    """Return n struct hotmoe_tier_expert as a read-only array."""
    if n == 0:
        return np.empty(0, EXPERT)
    array = np.frombuffer(ffi.buffer(pointer, n * EXPERT.itemsize), EXPERT)
    array.flags.writeable = False
    return array


# ---- what C calls ----


@ffi.def_extern(error=-1, onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_tier_create(user_data: Any, config: Any, out: Any) -> int:
    """Make a `struct hotmoe_tier_manager`."""
    source: Source = ffi.from_handle(user_data)
    source.inside = True
    try:
        handle = source.bind(config)
    except BaseException as error:
        source.keep(error)
        return -1
    finally:
        source.inside = False
    out.struct_size = ffi.sizeof("struct hotmoe_tier_manager")
    out.abi_version = lib.HOTMOE_TIER_ABI_VERSION
    out.context = handle
    out.on_step = lib.hotmoe_py_tier_on_step
    out.reset = lib.hotmoe_py_tier_reset
    out.free = lib.hotmoe_py_tier_free
    return 0


@ffi.def_extern(error=-1, onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_tier_on_step(context: Any, step: Any, requests: Any, max_requests: int) -> int:
    """See hotmoe_tier_manager.on_step."""
    n = ffi.new("int32_t *")
    return int(n[0]) if _call(context, TierBound.on_step, step, requests, max_requests, n) else -1


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_tier_reset(context: Any) -> None:
    """See hotmoe_tier_manager.reset."""
    _call(context, TierBound.reset)


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_tier_free(context: Any) -> None:
    """See hotmoe_tier_manager.free: the last call for this handle."""
    bound: TierBound = ffi.from_handle(context)
    bound.source.unbind(context)
