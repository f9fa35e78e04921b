"""The built-in policies and their twins in Python decide the same, and the C slot map does what a model of it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hotmoe import policies
from hotmoe.policies import AdmissionPolicy, EvictionPolicy
from tests.policy_sides import NativeSide, PythonSide, ReplayedPools
from tests.routing import NAMES as TRACES
from tests.routing import routing
from tests.slot_model import SlotModel

PINS = [3, 11, 0, 7]

TWINS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": policies.Lru,
    "slru": policies.Slru,
    "slru(protected=0.3)": lambda: policies.Slru(protected=0.3),
    "lfu": policies.Lfu,
    "lfu(half_life=2.7)": lambda: policies.Lfu(half_life=2.7),
    "fifo": policies.Fifo,
    "lfru": policies.Lfru,
    "lfru(half_life=5, grace=0.3)": lambda: policies.Lfru(half_life=5, grace=0.3),
    "lrfu": policies.Lrfu,
    "lrfu(half_life=2.7)": lambda: policies.Lrfu(half_life=2.7),
    "s3fifo": policies.S3Fifo,
    "s3fifo(small=0.4)": lambda: policies.S3Fifo(small=0.4),
    "least-stale": policies.LeastStale,
    "least-stale(window=5)": lambda: policies.LeastStale(window=5),
    "static(pins=3 11 0 7)": lambda: policies.Static(PINS),
    "static(pins=0:3 11 0 7;2:1)": lambda: policies.Static({0: PINS, 2: [1]}),
    "random": policies.Random,
    "random(seed=12345)": lambda: policies.Random(seed=12345),
}
ADMISSION_TWINS: dict[str, Callable[[], AdmissionPolicy]] = {
    "second-miss": policies.SecondMiss,
    "second-miss(memory=3)": lambda: policies.SecondMiss(memory=3),
    "ghost": policies.Ghost,
    "ghost(size=0.5)": lambda: policies.Ghost(size=0.5),
}
PAIRS = [(name, "always") for name in TWINS] + [("lru", name) for name in ADMISSION_TWINS]


def twin_of(policy: str, admission: str) -> tuple[Any, Any]:
    return TWINS[policy](), ADMISSION_TWINS[admission]() if admission in ADMISSION_TWINS else "always"


def test_every_built_in_has_a_twin() -> None:
    assert {name.partition("(")[0] for name in TWINS} == set(policies.registry.POLICIES.native())
    assert {name.partition("(")[0] for name in ADMISSION_TWINS} == set(policies.registry.ADMISSIONS.native()) - {"always"}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize(("policy", "admission"), [*PAIRS, ("lrfu", "ghost")])
def test_twins_agree_on_recorded_routing(policy: str, admission: str, trace: str) -> None:
    """Same hits, loads and victims, event after event, and the same slots in the end, of a pool of a quarter of the experts."""
    recorded = routing(trace)
    n_slots = max(recorded.n_used, recorded.n_expert // 4)
    layers = tuple(range(recorded.n_layers))
    native = ReplayedPools(recorded.n_expert, n_slots, policy, admission, layers)
    python = ReplayedPools(recorded.n_expert, n_slots, *twin_of(policy, admission), layers)
    expected, found = native.feed(recorded.events), python.feed(recorded.events)
    assert expected is not None
    assert found == expected
    assert sum(map(len, expected[2])) > 500
    assert [native.slots(i) for i in layers] == [python.slots(i) for i in layers]
    native.close()
    python.close()


@pytest.mark.parametrize("cpu", [False, True], ids=["copy", "cpu"])
@pytest.mark.parametrize(("policy", "admission"), [*PAIRS, ("slru", "second-miss(memory=3)"), ("s3fifo", "ghost")])
def test_twins_and_model_agree_on_random_traces(policy: str, admission: str, cpu: bool) -> None:
    """Traces of 25 operations in which all else happens, too: drops, pins, loans ahead of use, resets, repeated steps.

    Three slot maps: the C one with the native policy and with the twin, and the model. 500 traces each way of serving misses, so
    1,000 for each pair; fewer where only options differ.
    """
    evictions = 0
    for seed in range(100 if "(" in policy + admission else 500):
        rng = random.Random(seed)
        n_expert = rng.choice([12, 16, 40])
        n_slots = rng.randint(4, n_expert - 1)
        sides = [NativeSide("policy", policy, n_expert, n_slots), NativeSide("admission", admission, n_expert, n_slots)]
        caches: list[Any] = [
            SlotModel(n_slots, *sides, refuse_means_no_slot=cpu),
            ReplayedPools(n_expert, n_slots, policy, admission, refuse_means_no_slot=cpu),
            ReplayedPools(n_expert, n_slots, *twin_of(policy, admission), refuse_means_no_slot=cpu),
        ]
        step = 0
        for _ in range(25):
            expert = rng.randrange(n_expert)
            step += rng.choice([0, 1, 1, 1, 5])
            # often few, the same ones: experts differ in how often they are used
            population = range(n_expert) if rng.random() < 0.4 else range(n_expert // 2)
            ids = rng.sample(population, rng.randint(1, 4)) * rng.choice([1, 1, 2])
            operation = rng.choices(["acquire", "drop", "pin", "unpin", "prefetch", "reset"], [40, 2, 2, 2, 3, 0.3])[0]
            arguments = {"acquire": (ids, step), "reset": ()}.get(operation, (expert,))
            results = [getattr(cache, operation)(*arguments) for cache in caches]
            assert all(result == results[0] for result in results), (seed, operation, arguments, results)
            evictions += len(results[0].evicted) if operation == "acquire" and results[0] else 0
            slots = [cache.slots() for cache in caches]
            assert all(s == slots[0] for s in slots), (seed, operation, arguments, slots)
        for cache in caches[1:]:
            cache.close()
    assert evictions > 100


def test_steps_may_go_back() -> None:
    """A step only has to differ from the one before for time to go on."""
    for policy in ("lfu", "lfru", "lrfu", "least-stale"):
        events = [
            (0, step, ids) for step, ids in [(9, [1, 2]), (10, [3, 4]), (1, [1, 5]), (2, [6]), (2, [1]), (0, [7, 8]), (9, [2])]
        ]
        native, python = ReplayedPools(10, 4, policy), ReplayedPools(10, 4, TWINS[policy]())
        assert native.feed(events) == python.feed(events)
        native.close()
        python.close()


def test_state_can_be_saved() -> None:
    """What `state_dict` returned makes a new object go on as the old one."""
    rng = random.Random(5)
    events = [(rng.sample(range(12), 3), step) for step in range(60)]
    for policy, admission in PAIRS:
        old, new = twin_of(policy, admission), twin_of(policy, admission)
        caches = []
        for made in (old, new):
            sides = [PythonSide(side, 12, 5) for side in made if side != "always"]
            caches.append(SlotModel(5, *sides))
        for ids, step in events[:30]:
            caches[0].acquire(ids, step)
        for before, after in zip(old, new, strict=True):
            if before != "always":
                after.load_state_dict(before.state_dict())
        for name in ("slot", "kept", "loans", "pins", "free"):
            setattr(caches[1], name, getattr(caches[0], name).copy())
        for ids, step in events[30:]:
            assert caches[0].acquire(ids, step) == caches[1].acquire(ids, step)


def test_the_twin_of_lru_serves_with_a_state_of_another_time() -> None:
    """Experts that it has never seen go, too, if need be."""
    side = PythonSide(policies.Lru(), 8, 4)
    side.on_access([6, 1, 2], [False] * 3, 1)
    assert side.select_evict(3, [1, 2, 4, 5]) == [1, 2, 4]
    side.on_access([1], [False], 2)
    assert side.select_evict(1, [1, 6]) == [6]
