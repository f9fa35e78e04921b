"""The slot map of one pool as `native/cache/slot_map.h` and `hotmoe/policy.h` describe it, in Python: an oracle for tests."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Protocol


class Outcome(NamedTuple):
    """What came of an event."""

    hits: list[int]
    loads: list[tuple[int, int]]  # expert, slot
    evicted: list[int]


class Policy(Protocol):
    """What the model asks of a policy and of an admission; see tests/policy_sides.py."""

    def on_access(self, experts: list[int], hit: list[bool], step: int) -> None: ...
    def select_evict(self, n: int, candidates: list[int]) -> list[int]: ...
    def admit(self, experts: list[int]) -> list[bool]: ...
    def on_evict(self, experts: list[int], in_event: bool = True) -> None: ...
    def on_load(self, experts: list[int], slots: list[int]) -> None: ...
    def reset(self) -> None: ...


class SlotModel:
    """Experts in slots. `slot` maps expert to slot; `kept` are the admitted ones; `loans` the others, oldest first."""

    def __init__(self, n_slots: int, policy: Policy, admission: Policy | None = None, refuse_means_no_slot: bool = False) -> None:
        self.n_slots, self.policy, self.admission, self.cpu = n_slots, policy, admission, refuse_means_no_slot
        self.sides = [policy] if admission is None else [policy, admission]
        self.reset()

    def reset(self) -> None:
        self.slot: dict[int, int] = {}
        self.kept: set[int] = set()
        self.loans: list[int] = []
        self.pins: Counter[int] = Counter()
        self.free = list(range(self.n_slots))[::-1]
        for side in self.sides:
            side.reset()

    def acquire(self, ids: list[int], step: int) -> Outcome | None:
        """Run an event; None if it does not fit."""
        mine = list(dict.fromkeys(ids))
        hits = [e for e in mine if e in self.slot]
        room = self.n_slots - sum(n > 0 and e not in mine for e, n in self.pins.items())
        if len(mine) > room and not self.cpu:
            return None
        for side in self.sides:
            side.on_access(mine, [e in self.slot for e in mine], step)
        judged = [e for e in mine if e not in self.kept]
        verdict = dict(
            zip(judged, self.admission.admit(judged) if self.admission and judged else [True] * len(judged), strict=True)
        )
        wanted = [e for e in judged if e not in self.slot and (verdict[e] or not self.cpu)][: room - len(hits)]
        evicted = self._make_room(mine, len(wanted) - len(self.free))
        loads = [(e, self.free.pop()) for e in wanted]
        self.slot.update(loads)
        self.loans = [e for e in self.loans if not verdict.get(e)] + [e for e in wanted if not verdict[e]]
        kept = [e for e in judged if verdict[e] and e in self.slot]
        self.kept.update(kept)
        if kept:
            self.policy.on_load(kept, [self.slot[e] for e in kept])
        return Outcome(hits, loads, evicted)

    def _make_room(self, mine: list[int], n: int) -> list[int]:
        free = [e for e in self.loans if not self.pins[e] and e not in mine][: max(n, 0)]
        self._take(free)
        if n > len(free):
            by_slot = sorted(self.kept, key=self.slot.__getitem__)
            victims = self.policy.select_evict(n - len(free), [e for e in by_slot if not self.pins[e] and e not in mine])
            self._take(victims)
            self.policy.on_evict(victims)
            free = free + victims
        return free

    def _take(self, experts: list[int], in_event: bool = True) -> None:
        if self.admission and experts:
            self.admission.on_evict(experts, in_event)
        for expert in experts:
            self.free.append(self.slot.pop(expert))
            self.loans = [e for e in self.loans if e != expert]
            self.kept.discard(expert)
            self.pins.pop(expert, None)

    def drop(self, expert: int) -> bool:
        """Take an expert's slot away; False if it has none."""
        if expert not in self.slot:
            return False
        kept = expert in self.kept
        self._take([expert], in_event=False)
        if kept:
            self.policy.on_evict([expert], in_event=False)
        return True

    def pin(self, expert: int) -> bool:
        self.pins[expert] += expert in self.slot
        return expert in self.slot

    def unpin(self, expert: int) -> bool:
        pinned = self.pins[expert] > 0
        self.pins[expert] -= pinned
        return pinned

    def prefetch(self, expert: int) -> bool:
        """Give an expert a slot on loan if there is one; return whether it is resident."""
        if expert not in self.slot and not self.free:
            self._take([e for e in self.loans if not self.pins[e]][:1], in_event=False)
        if expert not in self.slot and self.free:
            self.slot[expert] = self.free.pop()
            self.loans.append(expert)
        return expert in self.slot

    def slots(self) -> list[int]:
        """Return the expert in each slot, -1 for none."""
        by_slot = {slot: expert for expert, slot in self.slot.items()}
        return [by_slot.get(slot, -1) for slot in range(self.n_slots)]
