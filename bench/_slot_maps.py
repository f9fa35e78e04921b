"""The engine's slot maps, one event at a time: for studies of more than one cache, which `hotmoe.replay` does not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotmoe._binding import check, ffi, lib
from hotmoe.policies.registry import AdmissionSpec, PolicySpec, resolve
from hotmoe.replay import create_slot_maps
from hotmoe.traces import Trace


def slots_of(trace: Trace, share: float) -> list[int]:
    """Return how many slots a share of the experts is in each layer; as many at least as a token uses."""
    return [max(used, int(share * bank.n_expert + 1e-9)) for bank, used in zip(trace.banks, trace.n_used_of_banks(), strict=True)]


class SlotMaps:
    """A slot map for each bank of a trace.

    Attributes:
        n_slots: Slots of each.
        resident: Experts of each that have a slot.
    """

    def __init__(self, trace: Trace, n_slots: Sequence[int], policy: PolicySpec = None, admission: AdmissionSpec = None) -> None:
        """Make them, empty.

        Args:
            trace: Says which banks there are.
            n_slots: Slots for each of them.
            policy: As for `ExpertCache`.
            admission: The same.
        """
        self.n_slots = list(n_slots)
        self.resident: list[set[int]] = [set() for _ in n_slots]
        self._names = resolve(policy, admission)
        banks = trace.banks
        columns = [b.layer for b in banks], [b.bank for b in banks], [b.n_expert for b in banks]
        self._replay = create_slot_maps(self._names, *columns, n_slots)

        self._n_evicted = ffi.new("int32_t[1]")
        self._evicted = ffi.new("int32_t[]", max(b.n_expert for b in trace.banks))
        self._results = ffi.new("struct hotmoe_replay_results *", {"evictions": self._n_evicted, "evicted": self._evicted})
        self._event = {
            "pool": ffi.new("int32_t[1]"),
            "phase": ffi.new("int32_t[1]"),
            "n_tokens": ffi.new("int32_t[1]"),
            "step": ffi.new("uint64_t[1]"),
            "offsets": ffi.new("int64_t[2]"),
            "experts": ffi.new("int32_t[]", max(b.n_expert for b in trace.banks)),
        }
        self._events = ffi.new("struct hotmoe_replay_events *", {"n": 1, **self._event})

    def feed(self, bank: int, experts: Sequence[int], *, step: int, phase: int, n_tokens: int = 1) -> tuple[list[int], list[int]]:
        """Run an event of distinct experts, as many at most as there are slots.

        Returns:
            (experts that missed, experts that lost their slot).
        """
        event = self._event
        event["pool"][0], event["phase"][0], event["n_tokens"][0], event["step"][0] = bank, phase, n_tokens, step
        event["offsets"][1] = len(experts)
        event["experts"][0 : len(experts)] = list(experts)
        check(lib.hotmoe_replay_feed(self._replay, self._events, self._results))
        self._names.raise_pending()
        resident = self.resident[bank]
        missed = [expert for expert in experts if expert not in resident]
        evicted = list(self._evicted[0 : self._n_evicted[0]])
        resident.difference_update(evicted)
        resident.update(missed)
        return missed, evicted

    def drop(self, bank: int, expert: int) -> None:
        """Take an expert's slot away, if it has one."""
        if expert in self.resident[bank]:
            lib.hotmoe_replay_drop(self._replay, bank, expert)
            self.resident[bank].remove(expert)

    def __enter__(self) -> SlotMaps:
        return self

    def __exit__(self, *exception: Any) -> None:
        lib.hotmoe_replay_free(self._replay)
        self._names.close()
