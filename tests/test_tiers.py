"""Tier managers in the engine: what they are told, and what comes of what they ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotmoe._native import ffi, lib
from hotmoe.policies.registry import resolve
from hotmoe.tiers import EXPERT, TIERS, NoTier, Readahead, TierManager
from tests.harness import ALL, Logits, Runner, equal_bits, tokens_for
from tests.tiers import N_EXPERT, N_LAYER, PAGE, TOP_K, Engine, Recorder, everything, until


def lru(steps: list[Any], host_slots: int) -> Iterator[tuple[set[tuple[int, int]], set[tuple[int, int]]]]:
    """Yield what entered and what was dropped in each step, (layer, expert), by a plain reading of the definition."""
    held: dict[int, list[int]] = {layer: [] for layer in range(N_LAYER)}  # the least recent first
    for used, _, _ in steps:
        before = {(layer, e) for layer, experts in held.items() for e in experts}
        for layer, _, expert, _ in used:
            held[layer] = [e for e in held[layer] if e != expert] + [expert]
        wanted = {(layer, expert) for layer, _, expert, _ in used}
        for layer in held:
            held[layer] = held[layer][-host_slots:]
        now = {(layer, e) for layer, experts in held.items() for e in experts}
        yield now - before, (before | wanted) - now


@pytest.mark.parametrize("slots", [4, 0])
@pytest.mark.parametrize(("ubatch", "host_slots"), [(1, 2), (1, 5), (4, 6), (1, 0)])
def test_a_manager_is_told_what_happens(sim: ModuleType, paged_model: Path, slots: int, ubatch: int, host_slots: int) -> None:
    with Engine(paged_model, slots=slots, tier_manager=Recorder(), host_slots=host_slots) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        engine.run(ubatch, n=24)
        tier = engine.tier  # tells of the last step
        bank = manager.banks[1]
        held = host_slots or N_EXPERT
        assert (bank.layer, bank.bank, bank.n_expert, bank.host_slots) == (1, 0, N_EXPERT, held)
        assert bank.expert_bytes == 3 * 512 * 256 * 34 // 32
        assert len(manager.steps) == tier.steps == 24 // ubatch
        assert [kw["step"] for _, _, kw in manager.steps] == list(range(1, 24 // ubatch + 1))
        assert {kw["phase"] for _, _, kw in manager.steps} == {"decode" if ubatch == 1 else "prefill"}
        for (used, dropped, _), (entered, gone) in zip(manager.steps, lru(manager.steps, held), strict=True):
            assert len(set(used)) == len(used) >= 2 * TOP_K
            assert {(layer, expert) for layer, _, expert, new in used if new} == entered
            assert sorted((layer, expert) for layer, _, expert, _ in dropped) == sorted(gone)
        assert tier.used == sum(len(used) for used, _, _ in manager.steps)
        assert tier.entered == sum(new for used, _, _ in manager.steps for *_, new in used)
        assert tier.dropped == sum(len(dropped) for _, dropped, _ in manager.steps)
        assert (tier.dropped == 0) == (host_slots == 0)


def test_used_are_the_experts_of_the_routing(sim: ModuleType, paged_model: Path) -> None:
    """Also those of ubatches that take the stock path, since their experts are more than the slots."""
    with Runner(paged_model, cpu_moe=ALL) as runner, resolve() as resolved:
        name, _, manager = resolved.add(TIERS, Recorder)
        texts = [ffi.new("char[]", t) for t in (b"4", str(name).encode())]
        params = ffi.new("struct hotmoe_cache_params *", {"record": 1})
        params.slots, params.tier_manager = texts
        out = ffi.new("struct hotmoe_cache **")
        assert lib.hotmoe_cache_attach(ffi.cast("struct llama_context *", runner.address()), params, out) == 0
        tokens = tokens_for(20, runner.n_vocab)
        for part in (tokens[:12], tokens[12:14], *([t] for t in tokens[14:])):
            runner.decode(part)
        counters = ffi.new("struct hotmoe_tier_counters *")
        assert lib.hotmoe_tier_stats(out[0], counters) == 0
        n_events, n_ids = ffi.new("int64_t *"), ffi.new("int64_t *")
        assert lib.hotmoe_trace_size(out[0], n_events, n_ids) == 0
        events = ffi.new("struct hotmoe_trace_event[]", n_events[0])
        ids, weights = ffi.new("int32_t[]", n_ids[0]), ffi.new("float[]", n_ids[0])
        assert lib.hotmoe_trace_take(out[0], events, n_events[0], ids, weights, n_ids[0]) == 0
        truth: dict[int, set[tuple[int, int]]] = {}
        at = 0
        for event in events:
            n = event.n_tokens * event.n_used
            truth.setdefault(event.step, set()).update((event.layer, e) for e in ids[at : at + n])
            at += n
        assert isinstance(manager, Recorder)
        assert [{(layer, e) for layer, _, e, _ in used} for used, _, _ in manager.steps] == [truth[s] for s in sorted(truth)]
        lib.hotmoe_cache_free(out[0])


@pytest.mark.parametrize("ubatch", [1, 4])
@pytest.mark.parametrize("slots", [8, 0])
@pytest.mark.parametrize(
    "manager", ["none", "readahead", NoTier, Readahead, Recorder(everything("dontneed")), Recorder(everything("willneed"))]
)
def test_logits_are_those_of_stock(
    sim: ModuleType, paged_model: Path, paged_logits: dict[int, Logits], manager: Any, slots: int, ubatch: int
) -> None:
    host_slots = 8 if slots else 3
    if slots == 0 and manager == "none":
        return
    runner = {"op_offload": False} if slots == 0 else {}
    if isinstance(manager, Recorder):
        manager = Recorder(manager.answer)
    with Engine(paged_model, runner, slots=slots, tier_manager=manager, host_slots=host_slots) as engine:
        logits = engine.run(ubatch)
        assert equal_bits(logits, paged_logits[ubatch])
        tier = engine.cache.stats().tier
        assert (tier is None) == (manager == "none")
        if tier is not None:
            assert tier.refused_ranges == tier.refused_requests == tier.failed_steps == 0
            assert tier.willneed.errors == tier.dontneed.errors == 0
            assert (tier.willneed.calls > 0) == (manager in ("readahead", Readahead) or _asks(manager, "willneed"))
            assert (tier.dontneed.calls > 0) == (
                (manager in ("readahead", Readahead) and tier.dropped > 0) or _asks(manager, "dontneed")
            )
            assert slots or tier.dropped > 0


def _asks(manager: Any, advice: str) -> bool:
    return isinstance(manager, Recorder) and advice in manager.answer(np.empty(0, EXPERT), np.empty(0, EXPERT))


def read_page_by_page(path: Path) -> None:
    """Bring a file that nobody maps into the page cache anew, in folios of one page: no two experts then share one."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while file.read(PAGE):
            pass


def test_pages_leave_and_come_back(sim: ModuleType, paged_model: Path) -> None:
    read_page_by_page(paged_model)
    with Engine(paged_model, tier_manager=Recorder()) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        everyone = [(layer, e) for layer in range(N_LAYER) for e in range(N_EXPERT)]

        def gone() -> set[tuple[int, int]] | None:
            """Return those of whose own pages none is in the page cache; None unless all are of the others."""
            states = {expert: engine.resident(*expert) for expert in everyone}
            assert all(n_bytes >= 3 * 32 * PAGE for n_bytes, _ in states.values())
            if not all(cached in (0, n_bytes) for n_bytes, cached in states.values()):
                return None  # being read
            return {expert for expert, (_, cached) in states.items() if cached == 0}

        def ask(answer: Any) -> Any:
            """Run a step and have this done; return the calls and bytes that it took, by advice."""
            manager.answer = lambda used, dropped: None
            before = engine.tier
            manager.answer = lambda used, dropped: answer
            engine.run(n=1)
            after = engine.tier
            return [
                (b.calls - a.calls, b.bytes - a.bytes)
                for a, b in ((before.willneed, after.willneed), (before.dontneed, after.dontneed))
            ]

        assert ask(None) == [(0, 0), (0, 0)]
        assert gone() == set()
        in_use = {(layer, e) for layer, _, e, _ in manager.steps[-1][0]}
        a, b, c, d = [expert for expert in everyone if expert not in in_use][::7]
        own = {expert: engine.resident(*expert)[0] for expert in everyone}

        assert ask({"dontneed": [(layer, 0, e) for layer, e in (a, b, d)]}) == [(0, 0), (9, own[a] + own[b] + own[d])]
        assert gone() == {a, b, d}
        (calls, n_bytes), dontneed = ask({"willneed": [a, d], "dontneed": [c]})
        assert until(lambda: gone() == {b, c})
        assert (calls, dontneed) == (6, (3, own[c]))
        # the pages at both ends, too, which others share
        assert own[a] + own[d] < n_bytes <= own[a] + own[d] + 6 * 2 * PAGE


def test_readahead_follows_the_count(sim: ModuleType, paged_model: Path) -> None:
    """What was dropped last is gone, what entered last is there; in between the system reads what it likes."""
    with (
        Engine(paged_model, slots=2, tier_manager="readahead", host_slots=2) as engine,
        Engine(paged_model, slots=2, tier_manager=Recorder(), host_slots=2) as twin,
    ):
        n_checked = 0
        for token in tokens_for(12, engine.runner.n_vocab):
            engine.runner.decode([token])
            twin.runner.decode([token])
            tier, _ = engine.tier, twin.tier
            manager = twin.cache.tier_manager_object
            assert isinstance(manager, Recorder)
            used, dropped, _ = manager.steps[-1]
            for layer, _, expert, new in used:
                n_bytes, _ = engine.resident(layer, expert)
                assert not new or until(lambda b=n_bytes, x=layer, y=expert: engine.resident(x, y)[1] == b)
            n_checked += len(dropped)
        assert tier.dropped == n_checked > 0
        assert tier.dontneed.calls == 3 * tier.dropped
        assert tier.willneed.calls == 3 * tier.entered


# ---- twins ----

experts = st.tuples(st.integers(0, N_LAYER - 1), st.just(0), st.integers(0, N_EXPERT - 1))


@given(
    steps=st.lists(
        st.tuples(
            st.lists(experts, unique=True, min_size=1, max_size=12), st.lists(experts, unique=True, max_size=6), st.integers(0)
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize(("native", "python"), [("readahead", Readahead), ("none", NoTier)])
def test_twins_ask_for_the_same(native: str, python: type[TierManager], steps: Any) -> None:
    banks = ffi.new("struct hotmoe_tier_bank[]", [{"layer": i, "n_expert": N_EXPERT, "host_slots": 4} for i in range(N_LAYER)])
    config = ffi.new("struct hotmoe_tier_config *", {"n_banks": N_LAYER, "banks": banks})
    room = 2 * N_LAYER * N_EXPERT
    with resolve() as resolved:
        answers = []
        for name in (native, resolved.add(TIERS, python)[0]):
            manager = ffi.new("struct hotmoe_tier_manager *")
            assert lib.hotmoe_tier_create(str(name).encode(), config, manager) == 0
            rows = []
            for used, dropped, entered in steps:
                u = ffi.new("struct hotmoe_tier_expert[]", [(*e, entered >> i & 1) for i, e in enumerate(used)])
                d = ffi.new("struct hotmoe_tier_expert[]", [(*e, 0) for e in dropped])
                step = ffi.new(
                    "struct hotmoe_tier_step *",
                    {"step": 1, "n_used": len(used), "n_dropped": len(dropped), "used": u, "dropped": d},
                )
                out = ffi.new("struct hotmoe_tier_request[]", room)
                n = manager.on_step(manager.context, step, out, room)
                rows.append([(r.layer, r.bank, r.expert, r.advice) for r in out[0:n]])
            answers.append(rows)
            if manager.free:
                manager.free(manager.context)
        resolved.raise_pending()
    assert answers[0] == answers[1]
    if native == "none":
        assert not any(answers[0])
    else:
        moved = [len(dropped) + sum(entered >> i & 1 for i in range(len(used))) for used, dropped, entered in steps]
        assert [len(row) for row in answers[0]] == moved


@pytest.mark.parametrize("ubatch", [1, 4])
def test_twins_do_the_same_in_the_engine(sim: ModuleType, paged_model: Path, ubatch: int) -> None:
    counters = []
    for manager in ("readahead", Readahead):
        with Engine(paged_model, tier_manager=manager, host_slots=4) as engine:
            engine.run(ubatch, n=40)
            tier = engine.tier
            counters.append((tier.steps, tier.used, tier.entered, tier.dropped, tier.willneed, tier.dontneed))
    assert counters[0] == counters[1]
    assert counters[0][3] > 0
