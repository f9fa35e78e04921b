"""Whatever may happen to a pool, in any order: one state machine over every policy and admission, native and in Python.

Four objects go through the same operations and must agree after each of them: the model (tests/slot_model.py) with a policy and
an admission of its own, the C slot map with the policy by name or as the class that users have, and the C slot map once more with
`Mirror`, which stands between the map and the policy, and checks what the policy is told. To resize is to begin anew with another
size; that a copy fails is `drop`.

What must hold, besides: no expert has two slots; no slot is lost, and none is emptied while another is free; neither the experts
of an event nor those that are pinned are evicted (CASE 4); the sums agree; what a policy believes to be resident is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from hotmoe._native import ffi, lib
from hotmoe.policies import AdmissionPolicy, EvictionPolicy
from tests.policy_sides import NativeSide, PythonSide, ReplayedPools
from tests.slot_model import SlotModel
from tests.test_twins import ADMISSION_TWINS, TWINS

N_EXPERT = 12

experts = st.integers(0, N_EXPERT - 1)
sizes = st.integers(1, N_EXPERT)


class Mirror(EvictionPolicy):
    """Stands before a policy, and holds what it is told against what must be."""

    wants_weights = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.slot_of: dict[int, int] = {}  # experts with a slot to keep
        self.resident: set[int] = set()  # those and the ones on loan: set from outside, as of the last event's end
        self.pinned: set[int] = set()  # set from outside
        self.event: list[int] = []

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        self.event = experts.tolist()
        assert set(self.slot_of) <= self.resident
        assert [bool(h) for h in hit] == [e in self.resident for e in self.event]
        self.inner.on_access(self.event, [bool(h) for h in hit], kw["step"])

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> list[int]:
        assert 0 < n <= len(candidates)
        assert sorted(candidates.tolist()) == sorted(set(self.slot_of) - set(self.event) - self.pinned)
        answer: list[int] = self.inner.select_evict(n, candidates.tolist())
        return answer

    def on_evict_many(self, layer: int, experts: Any, **kw: Any) -> None:
        for expert in experts.tolist():
            del self.slot_of[expert]
            self.resident.discard(expert)
        self.inner.on_evict(experts.tolist(), in_event="step" in kw)

    def on_load_many(self, layer: int, experts: Any, slots: Any, **kw: Any) -> None:
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            assert expert not in self.slot_of
            assert slot not in self.slot_of.values()
            self.slot_of[expert] = slot
            self.resident.add(expert)
        self.inner.on_load(experts.tolist(), slots.tolist())

    def reset(self) -> None:
        self.slot_of.clear()
        self.resident.clear()
        self.inner.reset()


class AdmissionMirror(AdmissionPolicy):
    """The same for an admission."""

    wants_weights = False

    def __init__(self, inner: Any, policy: Mirror) -> None:
        self.inner, self.policy = inner, policy
        self.lost: list[int] = []  # since somebody looked

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        self.inner.on_access(experts.tolist(), [bool(h) for h in hit], kw["step"])

    def admit_many(self, layer: int, experts: Any, **kw: Any) -> list[bool]:
        assert experts.tolist() == [e for e in self.policy.event if e not in self.policy.slot_of]
        verdicts: list[bool] = self.inner.admit(experts.tolist())
        return verdicts

    def on_evict_many(self, layer: int, experts: Any, **kw: Any) -> None:
        self.lost += experts.tolist()
        self.policy.resident.difference_update(experts.tolist())
        self.inner.on_evict(experts.tolist(), in_event="step" in kw)

    def reset(self) -> None:
        self.inner.reset()


class Fed(NamedTuple):
    """What the C side said about an event."""

    accesses: int
    hits: int
    loads: int
    fallbacks: int
    evicted: list[int]


class Pool(ReplayedPools):
    """The C slot map of one layer."""

    def run(self, ids: list[int], step: int) -> Fed | None:
        """Run an event; None if it does not fit."""
        events = ffi.new("struct hotmoe_replay_events *")
        keep = {
            "pool": ffi.new("int32_t[]", 1),
            "phase": ffi.new("int32_t[]", 1),
            "n_tokens": ffi.new("int32_t[]", [1]),
            "step": ffi.new("uint64_t[]", [step]),
            "offsets": ffi.new("int64_t[]", [0, len(ids)]),
            "experts": ffi.new("int32_t[]", ids),
        }
        events.n = 1
        for name, array in keep.items():
            setattr(events, name, array)
        out = {name: ffi.new("int32_t[]", 1) for name in ("accesses", "hits", "loads", "evictions", "fallbacks")}
        out["evicted"] = ffi.new("int32_t[]", len(ids))
        status = lib.hotmoe_replay_feed(self.replay, events, ffi.new("struct hotmoe_replay_results *", out))
        self.names.raise_pending()
        if status != 0:
            return None
        return Fed(*(out[name][0] for name in Fed._fields[:-1]), list(out["evicted"][0 : out["evictions"][0]]))


class Pair(NamedTuple):
    """A policy and an admission to test; `python`: as classes."""

    policy: str
    admission: str
    python: bool
    miss_on_cpu: bool

    def by_name(self) -> tuple[Any, Any]:
        """Return them as users give them."""
        if not self.python:
            return self.policy, self.admission
        return TWINS[self.policy](), ADMISSION_TWINS[self.admission]() if self.admission != "always" else "always"

    def sides(self, n_slots: int) -> tuple[Any, Any]:
        """Return them as the model calls them."""
        policy, admission = self.by_name()
        if self.python:
            return PythonSide(policy, N_EXPERT, n_slots), (
                NativeSide("admission", admission, N_EXPERT, n_slots)
                if isinstance(admission, str)
                else PythonSide(admission, N_EXPERT, n_slots)
            )
        return NativeSide("policy", policy, N_EXPERT, n_slots), NativeSide("admission", admission, N_EXPERT, n_slots)


class SlotMapStates(RuleBasedStateMachine):
    """All that can happen to a pool."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.pools: list[Pool] = []

    @initialize(n_slots=sizes)
    def begin(self, n_slots: int) -> None:
        self.teardown()
        options = {"refuse_means_no_slot": self.pair.miss_on_cpu}
        self.n_slots, self.step = n_slots, 1
        self.model = SlotModel(n_slots, *self.pair.sides(n_slots), **options)
        policy, admission = self.pair.sides(n_slots)
        self.mirror = Mirror(policy)
        self.admission_mirror = AdmissionMirror(admission, self.mirror)
        self.pools = [
            Pool(N_EXPERT, n_slots, *self.pair.by_name(), **options),
            Pool(N_EXPERT, n_slots, self.mirror, self.admission_mirror, **options),
        ]
        self.pins = [0] * N_EXPERT
        self.before: list[int] = [-1] * n_slots

    def both(self, operation: Callable[[Any], Any]) -> Any:
        """Do something to both C slot maps, and return what came of it."""
        self.before = self.pools[0].slots()
        self.mirror.resident = {e for e in self.before if e >= 0}
        self.mirror.pinned = {e for e, n in enumerate(self.pins) if n > 0}
        self.admission_mirror.lost.clear()
        first, second = [operation(pool) for pool in self.pools]
        for pool in self.pools:
            pool.names.raise_pending()
        assert first == second
        return first

    @rule(ids=st.lists(experts, min_size=1, max_size=7), advance=st.sampled_from([1, 1, 1, 0, 3]))
    def event(self, ids: list[int], advance: int) -> None:
        self.step += advance
        mine = list(dict.fromkeys(ids))
        if len(mine) > self.n_slots and not self.pair.miss_on_cpu:
            self.waves(mine)
            return
        fed = self.both(lambda pool: pool.run(ids, self.step))
        outcome = self.model.acquire(ids, self.step)
        held = [e for e, n in enumerate(self.pins) if n > 0]
        if outcome is None or fed is None:
            assert outcome is None
            assert fed is None
            assert len(set(mine) | set(held)) > self.n_slots, "it would have fitted"
            return
        after = self.pools[0].slots()
        loads = [(e, after.index(e)) for e in mine if e in after and e not in self.before]
        assert (fed.hits, loads, fed.evicted) == (len(outcome.hits), outcome.loads, outcome.evicted)
        assert fed.loads == len(loads)
        assert not set(fed.evicted) & (set(mine) | set(held))
        if not self.pair.miss_on_cpu:
            assert set(mine) <= set(after)
            assert fed.loads == fed.accesses - fed.hits
        self.check_sums(fed, len(mine))

    def waves(self, mine: list[int]) -> None:
        """Run an event with more experts than there are slots."""
        if any(self.pins):  # what a half-run event leaves behind nobody promises
            return
        fed = self.both(lambda pool: pool.run(mine, self.step))
        parts = [mine[at : at + self.n_slots] for at in range(0, len(mine), self.n_slots)]
        outcomes = [self.model.acquire(part, self.step) for part in parts]
        assert fed.evicted == [e for outcome in outcomes for e in outcome.evicted]
        assert fed.hits == len(set(mine) & set(self.before))
        assert fed.loads == sum(len(outcome.loads) for outcome in outcomes)
        self.check_sums(fed, len(mine))

    def check_sums(self, fed: Fed, n: int) -> None:
        """Verify that the numbers of an event fit together and with the slots before and after."""
        after = self.pools[0].slots()
        n_before, n_after = (sum(e >= 0 for e in slots) for slots in (self.before, after))
        assert fed.accesses == n
        assert 0 <= fed.hits <= n
        assert n_after == n_before + fed.loads - len(fed.evicted)
        assert not fed.evicted or n_after == self.n_slots, "evicted while a slot was free"
        assert fed.fallbacks == 0
        assert self.admission_mirror.lost == fed.evicted

    def one_of(self, candidates: list[int], number: int) -> int:
        """Return one of some experts, or, without any and for multiples of 5, the number itself: any expert."""
        return candidates[number % len(candidates)] if candidates and number % 5 else number

    def occupied(self) -> list[int]:
        return [e for e in self.pools[0].slots() if e >= 0]

    @rule(number=experts)
    def drop(self, number: int) -> None:
        expert = self.one_of(self.occupied(), number)
        had = self.both(lambda pool: pool.drop(expert))
        assert had == self.model.drop(expert) == (expert in self.before)
        assert self.admission_mirror.lost == [expert] * had
        self.pins[expert] = 0

    @rule(number=experts)
    def pin(self, number: int) -> None:
        expert = self.one_of(self.occupied(), number)
        done = self.both(lambda pool: pool.pin(expert))
        assert done == self.model.pin(expert) == (expert in self.before)
        self.pins[expert] += done

    @rule(number=experts)
    def unpin(self, number: int) -> None:
        expert = self.one_of([e for e, n in enumerate(self.pins) if n > 0], number)
        done = self.both(lambda pool: pool.unpin(expert))
        assert done == self.model.unpin(expert) == (self.pins[expert] > 0)
        self.pins[expert] -= done

    @rule(expert=experts)
    def prefetch(self, expert: int) -> None:
        """CASE 18: what is fetched ahead of its use takes the slot of nothing that was admitted."""
        kept = set(self.mirror.slot_of)
        resident = self.both(lambda pool: pool.prefetch(expert))
        after = self.pools[0].slots()
        assert resident == self.model.prefetch(expert) == (expert in after)
        lost = set(self.before) - set(after) - {-1}
        assert self.admission_mirror.lost == list(lost)
        assert len(lost) <= (-1 not in self.before)
        assert not lost & (kept | {e for e, n in enumerate(self.pins) if n > 0})
        assert set(self.mirror.slot_of) == kept, "on probation: the policy does not know it yet"

    @rule()
    def reset(self) -> None:
        self.both(lambda pool: pool.reset())
        self.model.reset()
        self.pins = [0] * N_EXPERT
        assert self.pools[0].slots() == [-1] * self.n_slots

    @rule(n_slots=sizes)
    def resize(self, n_slots: int) -> None:
        self.begin(n_slots)

    @invariant()
    def maps_agree(self) -> None:
        if self.pools:
            assert self.pools[0].slots() == self.pools[1].slots() == self.model.slots()

    @invariant()
    def map_is_injective_and_keeps_what_is_pinned(self) -> None:
        if self.pools:
            occupied = self.occupied()
            assert len(set(occupied)) == len(occupied)
            assert set(occupied) <= set(range(N_EXPERT))
            assert {e for e, n in enumerate(self.pins) if n > 0} <= set(occupied)

    @invariant()
    def the_policy_knows_what_is_there_but_loans(self) -> None:
        if self.pools:
            here = {e: slot for slot, e in enumerate(self.pools[1].slots()) if e >= 0}
            assert self.mirror.slot_of == {e: slot for e, slot in here.items() if e not in self.model.loans}

    def teardown(self) -> None:
        for pool in self.pools:
            pool.close()
        self.pools = []


NAMES = [*(name for name in TWINS if "(" not in name), "static(pins=3 11 0 7)"]
COMBINED = ["second-miss", "second-miss(memory=3)", "ghost"]
PAIRS = [
    Pair(policy, admission, python, cpu)
    for (policy, admission), python, cpu in itertools.product(
        [*((name, "always") for name in NAMES), *itertools.product(["lru", "lfru", "s3fifo"], COMBINED)],
        [False, True],
        [False, True],
    )
]


@pytest.mark.parametrize(
    "pair",
    PAIRS,
    ids=lambda p: "-".join((p.policy, p.admission, "python" if p.python else "native", "cpu" if p.miss_on_cpu else "copy")),
)
def test_slot_map_states(pair: Pair) -> None:
    """CASE 4, and the rules of residency in general."""
    run_state_machine_as_test(
        lambda: SlotMapStates(pair),
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_every_built_in_is_in_it() -> None:
    """What is built in later has to be added."""
    from hotmoe.policies import registry

    assert {pair.policy.partition("(")[0] for pair in PAIRS} == set(registry.POLICIES.native())
    assert {pair.admission.partition("(")[0] for pair in PAIRS} == set(registry.ADMISSIONS.native())
    assert sum(pair.python for pair in PAIRS) * 2 == len(PAIRS)
