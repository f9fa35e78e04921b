"""The two sides that a test compares: policies behind the C ABI, and policies in Python; and the C slot map itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from hotmoe._native import ffi, lib
from hotmoe.policies import AdmissionPolicy, EvictionPolicy
from hotmoe.policies.registry import resolve
from tests.harness import native_error
from tests.slot_model import Outcome


class NativeSide:
    """A policy or an admission made by name, called as the cache calls it. `what`: "policy" or "admission"."""

    def __init__(self, what: str, spec: str, n_expert: int, n_slots: int, layer: int = 0) -> None:
        config = ffi.new("struct hotmoe_policy_config *", {"layer": layer, "n_expert": n_expert, "n_slots": n_slots})
        made = ffi.new(f"struct hotmoe_{what} *")
        assert getattr(lib, f"hotmoe_{what}_create")(spec.encode(), config, made) == 0, native_error()
        assert made.abi_version == lib.HOTMOE_POLICY_ABI_VERSION
        self.made = ffi.gc(made, lambda m: m.free(m.context) if m.free else None)
        self.event = ffi.new("struct hotmoe_event *")

    def on_access(self, experts: list[int], hit: list[bool], step: int) -> None:
        self.arrays = ffi.new("int32_t[]", experts), ffi.new("uint8_t[]", hit)
        self.event.n_experts, self.event.step, self.event.n_tokens = len(experts), step, 1
        self.event.experts, self.event.hit = self.arrays
        if self.made.on_access:
            self.made.on_access(self.made.context, self.event)

    def select_evict(self, n: int, candidates: list[int]) -> list[int]:
        victims = ffi.new("int32_t[]", n)
        assert self.made.select_evict(self.made.context, self.event, n, candidates, len(candidates), victims) == n
        assert len(set(victims)) == n
        assert set(victims) <= set(candidates)
        return list(victims)

    def admit(self, experts: list[int]) -> list[bool]:
        if not self.made.admit:
            return [True] * len(experts)
        admitted = ffi.new("uint8_t[]", len(experts))
        assert self.made.admit(self.made.context, self.event, len(experts), experts, admitted) == len(experts)
        return [bool(a) for a in admitted]

    def on_evict(self, experts: list[int], in_event: bool = True) -> None:
        if self.made.on_evict:
            self.made.on_evict(self.made.context, self.event if in_event else ffi.NULL, len(experts), experts)

    def on_load(self, experts: list[int], slots: list[int]) -> None:
        if self.made.on_load:
            self.made.on_load(self.made.context, self.event, len(experts), experts, slots)

    def reset(self) -> None:
        if self.made.reset:
            self.made.reset(self.made.context)


class PythonSide:
    """A policy or an admission in Python, called as the bridge calls it."""

    def __init__(self, policy: Any, n_expert: int, n_slots: int, layer: int = 0) -> None:
        self.policy, self.layer, self.kw = policy, layer, {}
        policy.setup(layer, n_expert, n_slots, bank=0)

    def on_access(self, experts: list[int], hit: list[bool], step: int) -> None:
        self.kw = {"phase": "decode", "step": step, "n_tokens": 1, "weights": None, "bank": 0}
        self.policy.on_access(self.layer, np.array(experts, np.int32), np.array(hit, np.uint8), **self.kw)

    def select_evict(self, n: int, candidates: list[int]) -> list[int]:
        return [int(e) for e in self.policy.select_evict(self.layer, n, np.array(candidates, np.int32), **self.kw)]

    def admit(self, experts: list[int]) -> list[bool]:
        return list(self.policy.admit_many(self.layer, np.array(experts, np.int32), **self.kw))

    def on_evict(self, experts: list[int], in_event: bool = True) -> None:
        self.policy.on_evict_many(self.layer, np.array(experts, np.int32), **(self.kw if in_event else {}))

    def on_load(self, experts: list[int], slots: list[int]) -> None:
        self.policy.on_load_many(self.layer, np.array(experts, np.int32), np.array(slots, np.int32), **self.kw)

    def reset(self) -> None:
        self.policy.reset()


class ReplayedPools:
    """Slot maps of the C side, one for each layer, with a policy and an admission by name or in Python."""

    def __init__(
        self,
        n_expert: int,
        n_slots: int,
        policy: str | EvictionPolicy,
        admission: str | AdmissionPolicy = "always",
        layers: tuple[int, ...] = (0,),
        refuse_means_no_slot: bool = False,
    ) -> None:
        self.names = resolve(policy, admission)
        self.n_slots = n_slots
        n = len(layers)
        texts = [ffi.new("char[]", name.encode()) for name in (self.names.policy, self.names.admission)]
        arrays = [ffi.new("int32_t[]", values) for values in (layers, [n_expert] * n, [n_slots] * n)]
        params = ffi.new("struct hotmoe_replay_params *", [n, *arrays, *texts, refuse_means_no_slot])
        out = ffi.new("struct hotmoe_replay **")
        status = lib.hotmoe_replay_create(params, out)
        self.names.raise_pending()
        assert status == 0, native_error()
        self.replay = ffi.gc(out[0], lib.hotmoe_replay_free)

    def feed(self, events: list[tuple[int, int, list[int]]]) -> tuple[list[int], list[int], list[list[int]]] | None:
        """Run events of (pool, step, ids); return hits, loads and evicted experts of each, or None if one does not fit."""
        n = len(events)
        offsets = np.cumsum([0] + [len(ids) for _, _, ids in events]).tolist()
        arrays = {
            "pool": ffi.new("int32_t[]", [pool for pool, _, _ in events]),
            "phase": ffi.new("int32_t[]", n),
            "n_tokens": ffi.new("int32_t[]", [1] * n),
            "step": ffi.new("uint64_t[]", [step for _, step, _ in events]),
            "offsets": ffi.new("int64_t[]", offsets),
            "experts": ffi.new("int32_t[]", [e for _, _, ids in events for e in ids]),
        }
        results = {name: ffi.new("int32_t[]", n) for name in ("hits", "loads", "evictions", "fallbacks")}
        results["evicted"] = ffi.new("int32_t[]", offsets[-1])
        status = lib.hotmoe_replay_feed(
            self.replay,
            ffi.new("struct hotmoe_replay_events *", {"n": n, **arrays}),
            ffi.new("struct hotmoe_replay_results *", results),
        )
        self.names.raise_pending()
        if status != 0:
            return None
        assert not any(results["fallbacks"])
        ends = np.cumsum([0, *results["evictions"]]).tolist()
        evicted = [list(results["evicted"][a:b]) for a, b in itertools.pairwise(ends)]
        return list(results["hits"]), list(results["loads"]), evicted

    def acquire(self, ids: list[int], step: int) -> Outcome | None:
        """Run an event of the first pool; as `SlotModel.acquire`."""
        before = self.slots()
        fed = self.feed([(0, step, ids)])
        if fed is None:
            return None
        after = self.slots()
        hits = [e for e in dict.fromkeys(ids) if e in before]
        slot = {e: s for s, e in enumerate(after)}
        loads = [(e, slot[e]) for e in dict.fromkeys(ids) if e not in before and e in slot]
        assert fed[:2] == ([len(hits)], [len(loads)])
        return Outcome(hits, loads, fed[2][0])

    def drop(self, expert: int) -> bool:
        return bool(lib.hotmoe_replay_drop(self.replay, 0, expert))

    def pin(self, expert: int) -> bool:
        return bool(lib.hotmoe_replay_pin(self.replay, 0, expert))

    def unpin(self, expert: int) -> bool:
        return bool(lib.hotmoe_replay_unpin(self.replay, 0, expert))

    def prefetch(self, expert: int) -> bool:
        return bool(lib.hotmoe_replay_prefetch(self.replay, 0, expert))

    def reset(self) -> None:
        assert lib.hotmoe_replay_reset(self.replay) == 0

    def slots(self, pool: int = 0) -> list[int]:
        experts = ffi.new("int32_t[]", self.n_slots)
        assert lib.hotmoe_replay_slot_map(self.replay, pool, experts, self.n_slots) == self.n_slots
        return list(experts)

    def close(self) -> None:
        ffi.release(self.replay)
        self.names.close()
