"""`ExpertCache(host_policy=, host_admission=)` through `hotmoe.Llama`: host memory behind a device's slots."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotmoe
from hotmoe import AdmissionPolicy, EvictionPolicy, ExpertCache
from hotmoe.errors import ArgumentError, PolicyError, StateError
from hotmoe.stats import StoreStats
from tests.harness import Logits, equal_bits
from tests.stream_faults import PROMPT, load, logits_of

SLOTS, HOST_SLOTS, N_LAYER, N_EXPERT = 6, 9, 2, 40


class BrokenError(Exception):
    pass


class Told(EvictionPolicy):
    """Least recently used, and a record of what it was told.

    Attributes:
        events: layer, experts, hits, weights and step of each.
        there: Experts of each layer that have a slot, but those on loan.
    """

    lends = False  # whether some may be on loan

    def __init__(self, fail: Callable[[str, int], None] = lambda method, call: None) -> None:
        self.events: list[tuple[int, list[int], list[bool], list[float] | None, int]] = []
        self.n_slots: dict[int, int] = {}
        self.there: dict[int, set[int]] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.clock = 0
        self.calls: dict[str, int] = {}
        self.fail = fail

    def called(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.fail(method, self.calls[method])

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        self.n_slots[layer], self.there[layer] = n_slots, set()

    def on_access(self, layer: int, experts: Any, hit: Any, *, weights: Any, step: int, **kw: Any) -> None:
        self.called("on_access")
        assert self.lends or [e in self.there[layer] for e in experts.tolist()] == (hit != 0).tolist()
        self.events.append((layer, experts.tolist(), (hit != 0).tolist(), None if weights is None else weights.tolist(), step))
        for expert in experts.tolist():
            self.clock += 1
            self.used[layer, expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> list[int]:
        self.called("select_evict")
        return sorted(candidates.tolist(), key=lambda e: self.used[layer, e])[:n]

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        self.there[layer].add(expert)

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        self.there[layer].remove(expert)


class FirstHalf(AdmissionPolicy):
    """Only experts with small ids may stay."""

    def admit(self, layer: int, expert: int, **kw: Any) -> bool:
        return expert < N_EXPERT // 2


def start(model: Path, **options: Any) -> hotmoe.Llama:
    return load(model, "SIM0", **{"slots": SLOTS, "host_slots": f"{HOST_SLOTS}s", "policy": "lru"} | options)


def cache_of(llm: hotmoe.Llama) -> ExpertCache:
    assert llm.expert_cache is not None
    return llm.expert_cache


def store_of(llm: hotmoe.Llama) -> StoreStats:
    store = cache_of(llm).stats().store
    assert store is not None
    return store


@pytest.fixture(scope="module")
def right(sim: ModuleType, tiny_model: Path) -> Logits:
    """Logits of the resident model."""
    with load(tiny_model, "SIM0") as llm:
        return logits_of(llm, PROMPT)


# ---- what it is told, and what it decides ----


def test_is_told_what_the_device_missed_and_gave_up(tiny_model: Path, right: Logits) -> None:
    device, host = Told(), Told()
    with start(tiny_model, policy=device, host_policy=host) as llm:
        assert equal_bits(logits_of(llm, PROMPT), right)
        cache, stats, store = cache_of(llm), cache_of(llm).stats(), store_of(llm)
        assert (cache.host_policy, cache.host_policy_object) == ("Told", host)
        assert (cache.host_admission, cache.host_admission_object) == ("always", None)
        assert (device.n_slots, host.n_slots) == (dict.fromkeys(range(N_LAYER), SLOTS), dict.fromkeys(range(N_LAYER), HOST_SLOTS))
        assert (store.host_policy_fallbacks, stats.total.policy_fallbacks) == (0, 0)
        host_there = sum(map(len, host.there.values()))

    # every event is of what the device missed, perhaps a part, or copies of what it gave up, of which nothing is to be read
    missed = [
        (layer, step, [e for e, hit in zip(experts, hits, strict=True) if not hit])
        for layer, experts, hits, _, step in device.events
    ]
    n_missed = sum(len(experts) for _, _, experts in missed)
    wanted = [event for event in missed if event[2]]
    n_released = 0
    for layer, experts, hits, _, step in host.events:
        if wanted and wanted[0] == (layer, step, experts + wanted[0][2][len(experts) :]):
            del wanted[0][2][: len(experts)]
            if not wanted[0][2]:
                wanted.pop(0)
        else:
            assert all(hits), (layer, step, experts)
            n_released += len(experts)
    assert not wanted, "host memory was not asked for what the device missed"
    assert n_released > 20

    looked_up = store.host_hits + store.host_misses
    assert looked_up == stats.total.misses == n_missed
    assert looked_up + n_released == sum(len(experts) for _, experts, _, _, _ in host.events)
    assert store.host_misses - store.host_evictions == host_there <= N_LAYER * HOST_SLOTS
    assert store.host_evictions > 0


def test_is_told_the_router_weights_of_what_the_device_missed(tiny_model: Path) -> None:
    """Those of the same event on the device, also where its experts do not fit into host memory at once."""
    device, host = Told(), Told()
    with start(tiny_model, slots=39, host_slots="4s", policy=device, host_policy=host) as llm:
        logits_of(llm, PROMPT)
    of_device: dict[tuple[int, int, int], float] = {}
    for layer, experts, _, weights, step in device.events:
        assert weights is not None
        of_device.update(((layer, step, e), w) for e, w in zip(experts, weights, strict=True))
    n = 0
    for layer, experts, hits, weights, step in host.events:
        if weights is None:
            assert all(hits), "only copies of what the device gave up have none"
            continue
        assert weights == [of_device[layer, step, e] for e in experts]
        n += len(experts)
    assert n > 2 * 30


def test_a_native_policy_decides_as_its_twin(tiny_model: Path) -> None:
    """And another one differently, so that it matters which is asked."""
    reads = []
    for spec in ("lru", Told, "fifo"):
        with start(tiny_model, host_policy=spec) as llm:
            logits_of(llm, PROMPT)
            reads.append((store_of(llm).host_hits, store_of(llm).host_misses, store_of(llm).host_evictions))
    assert reads[0] == reads[1] != reads[2]


def test_an_admission_in_python(tiny_model: Path, right: Logits) -> None:
    host = Told()
    host.lends = True
    with start(tiny_model, host_policy=host, host_admission=FirstHalf) as llm:
        assert equal_bits(logits_of(llm, PROMPT), right)
        store = store_of(llm)
        assert cache_of(llm).host_admission == "FirstHalf"
        assert isinstance(cache_of(llm).host_admission_object, FirstHalf)
    assert all(e < N_EXPERT // 2 for there in host.there.values() for e in there)
    assert 0 < store.host_not_admitted < store.host_hits + store.host_misses


# ---- what goes wrong ----


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["on_access", "select_evict"])
def test_an_exception_is_raised_after_the_call(error: type[BaseException], method: str, tiny_model: Path, right: Logits) -> None:
    """CASES 36 and 37: all of the ubatch is computed, and the cache goes on."""

    def fail(called: str, call: int) -> None:
        if called == method and 5 <= call < 15:
            raise error("broke")

    with start(tiny_model, host_policy=Told(fail)) as llm:
        llm.reset()
        with pytest.raises(error, match="broke"):
            llm.eval(PROMPT)
        assert store_of(llm).host_policy_fallbacks >= 1
        assert cache_of(llm).stats().total.policy_fallbacks == 0, "the device's policy has not failed"
        assert equal_bits(logits_of(llm, PROMPT), right)


def test_an_answer_that_cannot_be(tiny_model: Path, right: Logits) -> None:
    class Wrong(Told):
        wrong = True

        def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> list[int]:
            if not self.wrong:
                return super().select_evict(layer, n, candidates, **kw)
            return [int(candidates[0])] * n if n > 1 else [self.events[-1][1][0]]  # twice the same; of the event itself

    host = Wrong()
    with start(tiny_model, host_policy=host) as llm:
        llm.reset()
        with pytest.raises(PolicyError, match=r"Wrong\.select_evict for layer .* distinct ids out of"):
            llm.eval(PROMPT)
        fallbacks = store_of(llm).host_policy_fallbacks
        assert fallbacks > 1
        host.wrong = False
        assert equal_bits(logits_of(llm, PROMPT), right)
        assert store_of(llm).host_policy_fallbacks == fallbacks


def test_an_admission_that_fails(tiny_model: Path, right: Logits) -> None:
    class Fails(AdmissionPolicy):
        def admit(self, layer: int, expert: int, **kw: Any) -> bool:
            raise BrokenError("broke")

    with start(tiny_model, host_admission=Fails) as llm:
        llm.reset()
        with pytest.raises(BrokenError):
            llm.eval(PROMPT)
        store = store_of(llm)
        assert store.host_policy_fallbacks > 0
        assert store.host_not_admitted == 0, "all are admitted then"


def test_one_object_cannot_serve_both_tiers(tiny_model: Path, sim: ModuleType) -> None:
    policy = Told()
    with pytest.raises(StateError, match="another tier"):
        start(tiny_model, policy=policy, host_policy=policy)
    with start(tiny_model, policy=Told, host_policy=Told) as llm:
        assert cache_of(llm).policy_object is not cache_of(llm).host_policy_object


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"host_policy": "mru"}, PolicyError, "unknown policy 'mru'; known policies: .*lru"),
        ({"host_policy": "os:path"}, PolicyError, "EvictionPolicy"),
        ({"host_policy": "lrfu(half_life=-1)"}, PolicyError, "half_life"),
        ({"host_policy": FirstHalf}, TypeError, "EvictionPolicy"),
        ({"host_admission": "sometimes"}, PolicyError, "unknown admission 'sometimes'; known admissions: .*ghost"),
        ({"host_admission": 3}, TypeError, "AdmissionPolicy"),
        ({"host_policy": "lru", "store": None}, ArgumentError, "host_policy='lru' is about streamed experts.*store='stream'"),
        ({"host_policy": "lru", "store": "resident"}, ArgumentError, "host_policy='lru' is about streamed experts"),
        ({"host_admission": "ghost", "store": None}, ArgumentError, "host_admission='ghost' is about streamed experts"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ExpertCache(**{"store": "stream"} | options)


@pytest.mark.parametrize("options", [{"host_policy": "lru"}, {"host_admission": FirstHalf}])
def test_without_a_device_there_is_no_second_tier(options: dict[str, Any], tiny_model: Path) -> None:
    name = next(iter(options))
    with pytest.raises(ArgumentError, match=f"{name} .*the host slots are the pool.*give it as {name.removeprefix('host_')}"):
        load(tiny_model, host_slots=HOST_SLOTS, **options)
    with load(tiny_model, host_slots=HOST_SLOTS) as llm:
        assert (cache_of(llm).host_policy, cache_of(llm).host_admission) == ("", "")


# ---- what it says ----


def test_plan_and_stats_say_it(tiny_model: Path, sim: ModuleType) -> None:
    with start(tiny_model, host_policy="lrfu(half_life=8)", host_admission="ghost") as llm:
        logits_of(llm, PROMPT)
        plan = cache_of(llm).plan
        assert (plan.host_policy, plan.host_admission) == ("lrfu(half_life=8)", "ghost")
        assert "policy lru, admission always (host memory: lrfu(half_life=8), ghost)" in str(plan)
        assert json.loads(plan.to_json())["host_policy"] == "lrfu(half_life=8)"
        store = json.loads(cache_of(llm).stats().to_json())["store"]
        assert store["host_not_admitted"] > 0
        assert store["host_policy_fallbacks"] == 0
    with start(tiny_model) as llm:
        assert (cache_of(llm).host_policy, cache_of(llm).host_admission) == ("lfru", "always")


def test_copies_wish_the_same() -> None:
    cache = ExpertCache(store="stream", host_policy="slru", host_admission="ghost")
    assert (cache.host_policy, cache.host_admission) == ("slru", "ghost")
    for twin in (copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert repr(twin) == repr(cache)
        assert twin.host_policy == "slru"
    assert "host_policy='slru'" in repr(cache)
