"""The built-in eviction policies: each against a plain reading of its definition, on random traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotmoe._native import ffi, lib

N_EXPERT = 16
NAMES = ["lru", "slru", "lfu", "fifo"]


class Cache:
    """The rules of an event in a dozen lines: hits are judged first, an event's own experts are never candidates."""

    def __init__(self, name: str, n_slots: int) -> None:
        self.policy = ffi.new("struct hotmoe_policy *")
        config = ffi.new("struct hotmoe_policy_config *", {"n_expert": N_EXPERT, "n_slots": n_slots})
        assert lib.hotmoe_policy_create(name.encode(), config, self.policy) == 0
        assert self.policy.abi_version == lib.HOTMOE_POLICY_ABI_VERSION
        self.n_slots = n_slots
        self.resident: list[int] = []

    def event(self, experts: list[int]) -> tuple[list[int], list[int]]:
        """Run one event; return its misses and its victims."""
        p, c = self.policy, self.policy.context
        ids = ffi.new("int32_t[]", experts)
        hit = ffi.new("uint8_t[]", [e in self.resident for e in experts])
        event = ffi.new("struct hotmoe_event *", {"n_experts": len(experts), "experts": ids, "hit": hit, "n_tokens": 1})
        p.on_access(c, event)
        missed = [e for e in experts if e not in self.resident]
        victims: list[int] = []
        n = len(missed) - (self.n_slots - len(self.resident))
        if n > 0:
            candidates = [e for e in self.resident if e not in experts]
            out = ffi.new("int32_t[]", n)
            assert p.select_evict(c, event, n, candidates, len(candidates), out) == n
            victims = list(out)
            assert len(set(victims)) == n
            assert set(victims) <= set(candidates)
            p.on_evict(c, event, n, victims)
            self.resident = [e for e in self.resident if e not in victims]
        if missed:
            p.on_load(c, event, len(missed), missed, list(range(len(missed))))
            self.resident += missed
        return missed, victims

    def close(self) -> None:
        self.policy.free(self.policy.context)


def lowest(rank: Callable[[int], Any], candidates: list[int], n: int) -> list[int]:
    return sorted(candidates, key=lambda e: (rank(e), e))[:n]


class Lru:
    """Order of last use."""

    def __init__(self, n_slots: int) -> None:
        self.order: list[int] = []

    def access(self, experts: list[int], hits: list[int]) -> None:
        self.order = [e for e in self.order if e not in experts] + experts

    def victims(self, candidates: list[int], n: int) -> list[int]:
        return lowest(lambda e: self.order.index(e), candidates, n)

    def moved(self, loaded: list[int], evicted: list[int]) -> None: ...


class Fifo:
    """Order of loading."""

    def __init__(self, n_slots: int) -> None:
        self.order: list[int] = []

    def access(self, experts: list[int], hits: list[int]) -> None: ...

    def victims(self, candidates: list[int], n: int) -> list[int]:
        return [e for e in self.order if e in candidates][:n]

    def moved(self, loaded: list[int], evicted: list[int]) -> None:
        self.order = [e for e in self.order if e not in evicted] + loaded


class Lfu(Lru):
    """Uses, each worth half as much for every 64 events that passed since; ties go to the least recent."""

    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self.uses: list[tuple[int, int]] = []
        self.now = 0

    def access(self, experts: list[int], hits: list[int]) -> None:
        super().access(experts, hits)
        self.now += 1
        self.uses += [(e, self.now) for e in experts]

    def victims(self, candidates: list[int], n: int) -> list[int]:
        count = {e: sum(0.5 ** ((self.now - t) / 64) for x, t in self.uses if x == e) for e in candidates}
        return lowest(lambda e: (round(count[e], 9), self.order.index(e)), candidates, n)


class Slru:
    """Two lists, oldest first; at most 80 % of the slots are protected."""

    def __init__(self, n_slots: int) -> None:
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.limit = n_slots * 4 // 5

    def access(self, experts: list[int], hits: list[int]) -> None:
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


ORACLES: dict[str, Callable[[int], Any]] = {"lru": Lru, "fifo": Fifo, "lfu": Lfu, "slru": Slru}

events = st.lists(st.lists(st.integers(0, N_EXPERT - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=60)


@pytest.mark.parametrize("name", NAMES)
@given(trace=events, n_slots=st.integers(4, N_EXPERT))
@settings(deadline=None, max_examples=200)
def test_policy_does_what_its_definition_says(name: str, trace: list[list[int]], n_slots: int) -> None:
    cache, oracle = Cache(name, n_slots), ORACLES[name](n_slots)
    for experts in trace:
        before = list(cache.resident)
        missed, victims = cache.event(experts)
        oracle.access(experts, [e for e in experts if e in before])
        if victims:
            expected = oracle.victims([e for e in before if e not in experts], len(victims))
            assert sorted(victims) == sorted(expected)
        oracle.moved(missed, victims)
    cache.close()


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets(name: str) -> None:
    trace = [[1, 2, 3], [4, 5, 1], [6, 7, 1], [8, 9, 4], [1, 10, 11]]
    fresh, used = Cache(name, 6), Cache(name, 6)
    for experts in [[3, 4, 5], [5, 6, 7], [8, 9, 10], [3, 5, 9]]:
        used.event(experts)
    used.policy.reset(used.policy.context)
    used.resident = []
    assert [fresh.event(e) for e in trace] == [used.event(e) for e in trace]
    fresh.close()
    used.close()


def test_names() -> None:
    listed = [ffi.string(lib.hotmoe_policy_name(i)).decode() for i in range(lib.hotmoe_policy_count())]
    assert listed == NAMES
    assert lib.hotmoe_policy_name(len(listed)) == ffi.NULL
    assert all(ffi.string(lib.hotmoe_policy_description(i)) for i in range(len(listed)))


def test_unknown_name_lists_the_known_ones() -> None:
    policy = ffi.new("struct hotmoe_policy *")
    config = ffi.new("struct hotmoe_policy_config *", {"n_expert": 8, "n_slots": 4})
    assert lib.hotmoe_policy_create(b"belady", config, policy) == lib.HOTMOE_ERR_POLICY
    message = ffi.string(lib.hotmoe_last_error()).decode()
    assert '"belady"' in message
    assert all(name in message for name in NAMES)
