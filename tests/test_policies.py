"""The built-in policies and admissions: each against a plain reading of its definition, on random traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotmoe._native import ffi, lib
from tests.harness import native_error
from tests.policy_sides import NativeSide
from tests.slot_model import SlotModel

N_EXPERT = 16
NAMES = ["lru", "slru", "lfu", "fifo", "lfru", "lrfu", "s3fifo", "least-stale", "static", "random"]
ADMISSIONS = ["always", "second-miss", "ghost"]

Trace = list[tuple[list[int], int]]  # experts of each event, and by how much the step goes on before it

ids = st.lists(st.integers(0, N_EXPERT - 1), min_size=1, max_size=4, unique=True)
traces = st.lists(st.tuples(ids, st.integers(0, 2)), min_size=1, max_size=60)


def lowest(rank: Callable[[int], Any], candidates: list[int], n: int) -> list[int]:
    return sorted(candidates, key=lambda e: (rank(e), e))[:n]


class Lru:
    """Order of last use; and the time, which only goes on when the step changes."""

    def __init__(self, n_slots: int) -> None:
        self.order: list[int] = []
        self.uses: list[tuple[int, int]] = []
        self.now, self.step = 0, -1

    def access(self, experts: list[int], hits: list[int], step: int) -> None:
        self.order = [e for e in self.order if e not in experts] + experts
        self.now += step != self.step
        self.step = step
        self.uses += [(e, self.now) for e in experts]

    def uses_of(self, expert: int) -> list[int]:
        return [time for e, time in self.uses if e == expert]

    def victims(self, candidates: list[int], n: int) -> list[int]:
        return lowest(self.order.index, candidates, n)

    def check(self, victims: list[int], candidates: list[int]) -> None:
        assert sorted(victims) == sorted(self.victims(candidates, len(victims)))

    def moved(self, loaded: list[int], evicted: list[int]) -> None: ...


class Fifo(Lru):
    """Order of loading."""

    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.loaded: list[int] = []

    def victims(self, candidates: list[int], n: int) -> list[int]:
        return [e for e in self.loaded if e in candidates][:n]

    def moved(self, loaded: list[int], evicted: list[int]) -> None:
        self.loaded = [e for e in self.loaded if e not in evicted] + loaded


class LeastStale(Fifo):
    """Not used in this step or the one before: order of loading. Then the others: order of use."""

    def victims(self, candidates: list[int], n: int) -> list[int]:
        stale = [e for e in self.loaded if e in candidates and self.uses_of(e)[-1] < self.now - 1]
        return (stale + [e for e in self.order if e in candidates and e not in stale])[:n]


class Valued(Lru):
    """A value computed from all uses; of experts with the same uses the least recent goes."""

    def value(self, expert: int) -> float:
        raise NotImplementedError

    def check(self, victims: list[int], candidates: list[int]) -> None:
        for goes in victims:
            for stays in set(candidates) - set(victims):
                if self.uses_of(goes) == self.uses_of(stays):
                    assert self.order.index(goes) < self.order.index(stays)
                else:
                    assert self.value(goes) < self.value(stays) + 1e-9


class Lfu(Valued):
    """Uses, each worth half as much for every 64 steps that passed since."""

    half_life = 64

    def value(self, expert: int) -> float:
        return sum(0.5 ** ((self.now - time) / self.half_life) for time in self.uses_of(expert))


class Lrfu(Lfu):
    half_life = 16


class Lfru(Valued):
    """The count as of the last use, over the time since."""

    def value(self, expert: int) -> float:
        uses = self.uses_of(expert)
        return sum(0.5 ** ((uses[-1] - time) / 32) for time in uses) / (self.now - uses[-1] + 8)


class Slru(Lru):
    """Two lists, oldest first; at most 80 % of the slots are protected."""

    share = 0.8

    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.limit = int(n_slots * self.share)

    def access(self, experts: list[int], hits: list[int], step: int) -> None:
        for e in hits:
            if e in self.protected or self.limit > 0:
                for segment in (self.probation, self.protected):
                    if e in segment:
                        segment.remove(e)
                self.protected.append(e)
                if len(self.protected) > self.limit:
                    self.probation.append(self.protected.pop(0))
            else:
                self.probation.remove(e)
                self.probation.append(e)

    def victims(self, candidates: list[int], n: int) -> list[int]:
        return [e for e in self.probation + self.protected if e in candidates][:n]

    def moved(self, loaded: list[int], evicted: list[int]) -> None:
        self.probation = [e for e in self.probation if e not in evicted] + loaded
        self.protected = [e for e in self.protected if e not in evicted]


class SlruHalf(Slru):
    share = 0.5


class Lfu3(Lfu):
    half_life = 3


class Pinned(Lru):
    """Not on the list: order of last use. Then the list, from its end."""

    pins = (7, 2, 11, 5)

    def victims(self, candidates: list[int], n: int) -> list[int]:
        others = [e for e in self.order if e in candidates and e not in self.pins]
        return (others + [e for e in self.pins[::-1] if e in candidates])[:n]


ORACLES: dict[str, Callable[[int], Any]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "lfu(half_life=3)": Lfu3,
    "slru": Slru,
    "slru(protected=0.5)": SlruHalf,
    "lfru": Lfru,
    "lrfu": Lrfu,
    "lrfu(half_life=3)": Lfu3,
    "least-stale": LeastStale,
    "static": Lru,
    "static(pins=7 2 11 5)": Pinned,
    "static(pins=1:9;0:7 2 11 5)": Pinned,
    "static(pins=1:7 2 11 5)": Lru,
}


@pytest.mark.parametrize("spec", ORACLES)
@given(trace=traces, n_slots=st.integers(4, N_EXPERT))
@settings(deadline=None, max_examples=150)
def test_policy_does_what_its_definition_says(spec: str, trace: Trace, n_slots: int) -> None:
    cache, oracle = SlotModel(n_slots, NativeSide("policy", spec, N_EXPERT, n_slots)), ORACLES[spec](n_slots)
    step = 0
    for experts, advance in trace:
        step += advance
        before = list(cache.slot)
        outcome = cache.acquire(experts, step)
        assert outcome is not None
        oracle.access(experts, outcome.hits, step)
        if outcome.evicted:
            oracle.check(outcome.evicted, [e for e in before if e not in experts])
        oracle.moved([e for e, _ in outcome.loads], outcome.evicted)


def run(spec: str, n_slots: int, events: list[list[int]], n_expert: int = N_EXPERT) -> list[list[int]]:
    """Return what each event evicts."""
    cache = SlotModel(n_slots, NativeSide("policy", spec, n_expert, n_slots))
    outcomes = [cache.acquire(experts, step) for step, experts in enumerate(events)]
    return [outcome.evicted for outcome in outcomes if outcome]


def flat(lists: list[list[int]]) -> list[int]:
    return [e for experts in lists for e in experts]


class TestS3Fifo:
    """Ten slots: one for the small queue, nine for the main one."""

    fill = tuple([e] for e in range(10))

    def test_what_was_used_once_leaves_in_order(self) -> None:
        assert run("s3fifo", 10, [*self.fill, [10], [11, 12]])[10:] == [[0], [1, 2]]

    def test_a_hit_in_the_small_queue_leads_to_the_main_queue(self) -> None:
        # 0 moves on; nine others pass through the small queue before it; by then 1 to 9 are gone
        assert run("s3fifo", 10, [*self.fill, [0], *([e] for e in range(10, 15))])[11:] == [[1], [2], [3], [4], [5]]

    def test_an_expert_that_returns_soon_enters_the_main_queue(self) -> None:
        # 0 leaves, is remembered, and enters the main queue, where the flood of single uses does not reach it
        events = [*self.fill, [10], [0], *([e] for e in range(11, 16))]
        assert 0 not in flat(run("s3fifo", 10, events)[11:])

    @pytest.mark.parametrize(("n_between", "remembered"), [(8, True), (9, False)])
    def test_nine_ids_are_remembered(self, n_between: int, remembered: bool) -> None:
        # 0 leaves first, and n_between others until it enters again: forgotten, it has to begin in the small queue
        flood = [[e] for e in range(10, 10 + n_between)]
        evicted = run("s3fifo", 10, [*self.fill, *flood, [0], *([e] for e in range(20, 30))], 32)
        assert (0 not in flat(evicted[-10:])) == remembered

    def test_a_round_of_the_main_queue_for_each_of_three_hits(self) -> None:
        # all four were hit and go to the main queue, with no credit for more than one hit: 0 leaves as the first one there
        events = [[0, 1, 2, 3], [0, 1, 2, 3], [0], [4]]
        expected: list[list[int]] = [[], [], [], [0]]
        # 1 is hit five times. 5, 6 and 4, which is remembered by then, bring the small queue to its end
        events += [*([1] for _ in range(5)), [5], [6], [4]]
        expected += [*([] for _ in range(5)), [4], [5], [6]]
        # a new expert finds the small queue empty and the main queue loses one; the next one, remembered, enters the main queue
        for new, loses, remembered, passed in [
            (7, 2, 5, 7),  # 1 is passed over, the first time
            (8, 3, 6, 8),
            (9, 4, 7, 9),
            (10, 5, 8, 10),  # the second time
            (11, 6, 9, 11),
            (12, 7, 10, 12),
            (13, 8, 11, 13),  # the third time
            (14, 9, 12, 14),
            (15, 10, 13, 15),
        ]:
            events += [[new], [remembered]]
            expected += [[loses], [passed]]
        assert run("s3fifo(small=0)", 4, [*events, [16]], 32) == [*expected, [1]]

    def test_the_small_queue_has_its_share(self) -> None:
        # half the slots: at five in the small queue, it is the one to lose; below, the main queue
        hot = [[e] for e in range(5)]
        events = [*hot, *hot, [5], [6], [7], [8], [9], [10], [11], [12]]
        assert run("s3fifo(small=0.5)", 10, events)[-3:] == [[5], [6], [7]]


class TestRandom:
    @given(st.lists(st.integers(0, 99), min_size=2, max_size=40, unique=True), st.data())
    def test_the_order_of_candidates_does_not_matter(self, candidates: list[int], data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(candidates)))
        shuffled = data.draw(st.permutations(candidates))
        a, b = (NativeSide("policy", "random", 100, 50) for _ in range(2))
        assert a.select_evict(n, candidates) == b.select_evict(n, list(shuffled))

    def test_every_candidate_has_the_same_chance(self) -> None:
        side = NativeSide("policy", "random", 100, 50)
        counts = Counter(side.select_evict(1, [3, 7, 50, 99])[0] for _ in range(4000))
        assert set(counts) == {3, 7, 50, 99}
        assert all(900 < n < 1100 for n in counts.values())  # sigma is 27

    def test_seeds_and_layers_differ_and_reset_repeats(self) -> None:
        def draws(side: NativeSide) -> list[int]:
            return [side.select_evict(1, list(range(64)))[0] for _ in range(20)]

        sides = [NativeSide("policy", f"random(seed={seed})", 64, 50, layer) for seed in (0, 1) for layer in (0, 1)]
        all_draws = [draws(side) for side in sides]
        assert len({tuple(d) for d in all_draws}) == 4
        sides[0].reset()
        assert draws(sides[0]) == all_draws[0]


class SecondMiss:
    """Uses that were refused, with their times."""

    def __init__(self, n_slots: int) -> None:
        self.refused: dict[int, int] = {}

    def admit(self, expert: int, now: int) -> bool:
        if now - self.refused.get(expert, -1000) <= 3:
            del self.refused[expert]
            return True
        self.refused[expert] = now
        return False

    def lost(self, experts: list[int]) -> None: ...


class Ghost(SecondMiss):
    """As many ids as there are slots."""

    def __init__(self, n_slots: int) -> None:
        self.queue: list[int] = []
        self.n_slots = n_slots

    def admit(self, expert: int, now: int) -> bool:
        if expert in self.queue:
            self.queue.remove(expert)
            return True
        self.lost([expert])
        return False

    def lost(self, experts: list[int]) -> None:
        for expert in experts:
            self.queue = ([e for e in self.queue if e != expert] + [expert])[-self.n_slots :]


@pytest.mark.parametrize(("spec", "oracle_of"), [("second-miss(memory=3)", SecondMiss), ("ghost", Ghost)])
@given(trace=traces, n_slots=st.integers(4, N_EXPERT))
@settings(deadline=None, max_examples=150)
def test_admission_does_what_its_definition_says(spec: str, oracle_of: Any, trace: Trace, n_slots: int) -> None:
    sides = NativeSide("policy", "lru", N_EXPERT, n_slots), NativeSide("admission", spec, N_EXPERT, n_slots)
    cache, oracle = SlotModel(n_slots, *sides), oracle_of(n_slots)
    step = now = 0
    for i, (experts, advance) in enumerate(trace):
        step += advance
        now += i == 0 or advance > 0
        kept = set(cache.kept)
        admitted = {e for e in experts if e in kept or oracle.admit(e, now)}
        outcome = cache.acquire(experts, step)
        assert outcome is not None
        assert {e for e in experts if e in cache.kept} == admitted
        oracle.lost(outcome.evicted)


def test_second_miss_remembers_for_64_steps() -> None:
    for gap, admitted in [(64, True), (65, False)]:
        side = NativeSide("admission", "second-miss", N_EXPERT, 4)
        side.on_access([1], [False], 1)
        assert side.admit([1]) == [False]
        for step in range(2, 2 + gap):
            side.on_access([1 if step == 1 + gap else 2], [False], step)
        assert side.admit([1]) == [admitted]


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets(name: str) -> None:
    trace = [[1, 2, 3], [4, 5, 1], [6, 7, 1], [8, 9, 4], [1, 10, 11], [6], [12], [1, 13], [14, 15], [2, 3]]
    fresh, used = (SlotModel(6, NativeSide("policy", name, N_EXPERT, 6)) for _ in range(2))
    for step, experts in enumerate([[3, 4, 5], [5, 6, 7], [3, 6], [8, 9, 10], [3, 5, 9], [11, 12, 3]]):
        used.acquire(experts, step)
    used.reset()
    assert [fresh.acquire(e, i) for i, e in enumerate(trace)] == [used.acquire(e, i + 6) for i, e in enumerate(trace)]


@pytest.mark.parametrize("name", ADMISSIONS)
def test_admission_reset_forgets(name: str) -> None:
    trace = [[1, 2, 3], [1, 4], [2, 5], [6, 7, 8], [9], [1, 2]]
    caches = [
        SlotModel(6, NativeSide("policy", "lru", N_EXPERT, 6), NativeSide("admission", name, N_EXPERT, 6)) for _ in range(2)
    ]
    for step, experts in enumerate([[1, 2, 5], [6, 7, 8], [9, 10, 11]]):
        caches[1].acquire(experts, step)
    caches[1].reset()
    a, b = ([(cache.acquire(e, i), set(cache.kept)) for i, e in enumerate(trace)] for cache in caches)
    assert a == b


def test_names() -> None:
    for what, names in [("policy", NAMES), ("admission", ADMISSIONS)]:
        count, name, description = (getattr(lib, f"hotmoe_{what}_{f}") for f in ("count", "name", "description"))
        listed = [ffi.string(name(i)).decode() for i in range(count())]
        assert listed[: len(names)] == names
        assert name(len(listed)) == ffi.NULL
        assert all(ffi.string(description(i)) for i in range(len(names)))


@pytest.mark.parametrize(
    ("what", "spec", "words"),
    [
        ("policy", "belady", ['"belady"', *NAMES]),
        ("admission", "never", ['"never"', *ADMISSIONS]),
        ("policy", "slru(protected=2)", ["protected=2", "[0, 1]"]),
        ("policy", "lfu(half_life=0)", ["half_life=0"]),
        ("policy", "lrfu(halflife=3)", ['"halflife"', "half_life"]),
        ("policy", "lfru(grace=none)", ["grace=none"]),
        ("policy", "least-stale(window=1.5)", ["window", "whole"]),
        ("policy", "random(seed=-1)", ["seed=-1"]),
        ("policy", "static(pins=3 8)", ["8", "[0, 8)"]),
        ("policy", "static(pins=3 -1)", ["-1", "[0, 8)"]),
        ("policy", "static(pins=3 3)", ["3", "twice"]),
        ("policy", "static(pins=0:3;4)", ["layer", "colon"]),
        ("policy", "static(pins=:3)", ["layer", "colon"]),
        ("policy", "static(pins=3 x)", ["whole numbers"]),
        ("policy", "static(pins=1:3 x)", ["whole numbers"]),
        ("admission", "second-miss(memory=0)", ["memory=0"]),
        ("admission", "ghost(size=-1)", ["size=-1"]),
    ],
)
def test_what_is_wrong_is_said(what: str, spec: str, words: list[str]) -> None:
    config = ffi.new("struct hotmoe_policy_config *", {"n_expert": 8, "n_slots": 4})
    made = ffi.new(f"struct hotmoe_{what} *")
    assert getattr(lib, f"hotmoe_{what}_create")(spec.encode(), config, made) == lib.HOTMOE_ERR_POLICY
    message = native_error()
    assert all(word in message for word in words), message
