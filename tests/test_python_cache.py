"""`hotmoe.ExpertCache`: what it accepts, what it says, and whom it belongs to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotmoe
from hotmoe.cache import policies
from hotmoe.errors import ArgumentError, StateError
from hotmoe.plan import Plan, PlanBank, PlanDevice, format_bytes

N_LAYER, N_EXPERT, N_USED = 2, 40, 4  # of the model that these tests use


def load(model: Path, cache: hotmoe.ExpertCache | None, **options: Any) -> hotmoe.Llama:
    """Load quietly, with a small context."""
    return hotmoe.Llama(model, expert_cache=cache, n_ctx=128, verbose=False, **options)


@pytest.fixture(scope="module")
def live(sim: ModuleType, tiny_model: Path) -> Iterator[hotmoe.Llama]:
    """A model with 12 slots per layer that has generated 24 tokens from a prompt of 6."""
    with load(tiny_model, hotmoe.ExpertCache(slots=12, policy="lru", strict=True)) as llm:
        prompt = llm.tokenize(b"hello!", add_bos=False)
        for i, _ in enumerate(llm.generate(prompt, temp=0)):
            if i == 24:
                break
        yield llm


@pytest.mark.parametrize("slots", ["", "many", "-4", -4, "4.5", "6 GB/s", "6XiB", "32,48", "/", "32/", "auto auto"])
def test_bad_sizes_are_refused_at_once(slots: int | str) -> None:
    with pytest.raises(ArgumentError) as caught:
        hotmoe.ExpertCache(slots=slots)
    assert str(slots) in str(caught.value), "the message names the value"
    assert "6GiB" in str(caught.value), "... and shows what is legal"


@pytest.mark.parametrize("slots", [None, 4.0, True, [32], b"32"])
def test_sizes_of_a_wrong_type(slots: Any) -> None:
    with pytest.raises(TypeError, match="slots"):
        hotmoe.ExpertCache(slots=slots)


@pytest.mark.parametrize("slots", [32, "32", "6GiB", "1.5G", "512 MiB", "auto", "AUTO", "48/64", "6GiB / auto"])
def test_good_sizes(slots: int | str) -> None:
    cache = hotmoe.ExpertCache(slots=slots)
    assert cache.enabled
    assert cache.slots == str(slots).replace(" / ", "/")


def test_arguments_are_keywords() -> None:
    with pytest.raises(TypeError):
        hotmoe.ExpertCache(32)  # type: ignore[call-arg]


def test_builtin_policies() -> None:
    assert {"lru", "slru", "lfu", "fifo"} <= policies().keys()
    assert all(policies().values()), "each has a description"


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(hotmoe.PolicyError, match="'mru'") as caught:
        hotmoe.ExpertCache(policy="mru")
    for name in policies():
        assert name in str(caught.value)


def test_before_and_after_its_life(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    with pytest.raises(StateError, match="no model"):
        cache.stats()
    with pytest.raises(StateError, match="no model"):
        _ = cache.plan
    with load(tiny_model, cache) as llm:
        assert llm.expert_cache is cache
        assert cache.policy in policies()
    with pytest.raises(StateError, match="closed"):
        cache.stats()
    assert len(cache.plan.banks) == N_LAYER, "the plan outlives the model"


def test_one_cache_serves_one_model(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    with load(tiny_model, cache), pytest.raises(StateError, match="another Llama"):
        load(tiny_model, cache)
    with pytest.raises(StateError, match="is closed; make a new one"):
        load(tiny_model, cache)


def test_a_failed_load_leaves_the_cache_usable(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    with pytest.raises(hotmoe.ModelLoadError):
        load(Path("/nonexistent.gguf"), cache)
    with load(tiny_model, cache):
        assert cache.plan.slots == (8,)


def test_a_size_below_the_minimum_names_it(sim: ModuleType, tiny_model: Path) -> None:
    before = [sim.counters(i).allocated_bytes for i in range(2)]
    with pytest.raises(hotmoe.PlanError, match=rf"minimum is {N_USED} slots"):
        load(tiny_model, hotmoe.ExpertCache(slots=N_USED - 1))
    assert [sim.counters(i).allocated_bytes for i in range(2)] == before, "nothing is left on the devices"


def test_nothing_to_pool_names_the_fix(sim: ModuleType, tiny_model: Path) -> None:
    with pytest.raises(hotmoe.PlanError):
        load(tiny_model, hotmoe.ExpertCache(slots=8), cpu_moe=False)


def test_plan(live: hotmoe.Llama) -> None:
    assert live.expert_cache is not None
    plan = live.expert_cache.plan
    assert [bank.layer for bank in plan.banks] == list(range(N_LAYER))
    for bank in plan.banks:
        assert bank.pooled and not bank.reason
        assert (bank.n_expert, bank.n_expert_used, bank.n_slots) == (N_EXPERT, N_USED, 12)
        assert bank.n_tensors == 3
        assert bank.pool_bytes >= 12 * bank.expert_bytes > 0
        assert bank.device.startswith("SIM")
    assert plan.slots == (12,)
    assert plan.pool_bytes == sum(bank.pool_bytes for bank in plan.banks)
    assert {device.device for device in plan.devices} == {bank.device for bank in plan.banks}
    assert all(device.requested == "12" and not device.host_memory for device in plan.devices)
    assert json.loads(json.dumps(plan.as_dict()))["policy"] == "lru"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.policy = "fifo"  # type: ignore[misc]


def test_the_table_of_a_plan() -> None:
    bank = PlanBank(0, 0, True, 64, 8, 16, 3, 1 << 20, 16 << 20, "SIM0", "")
    dense = dataclasses.replace(bank, layer=4, pooled=False, n_slots=0, pool_bytes=0, reason="repacked by the CPU")
    banks = (*(dataclasses.replace(bank, layer=i) for i in range(4)), dense)
    text = str(Plan("lru", "always", banks, (PlanDevice("SIM0", "16", 4, False, 64 << 20, 1 << 30, 0),)))
    lines = text.splitlines()
    assert lines[0] == "expert cache: 4 of 5 expert banks pooled, policy lru, admission always, 64.0 MiB"
    assert "SIM0: 4 banks, 64.0 MiB of 1.0 GiB free, asked for 16" in lines[1]
    assert lines[2].startswith("  host memory: ")
    assert lines[4].split() == ["0-3", "SIM0", "16", "64", "8", "1.0", "MiB", "64.0", "MiB"], "equal layers share a row"
    assert lines[5].endswith("left out: repacked by the CPU")
    assert [format_bytes(n) for n in (0, 1023, 1536, 6 << 30, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "6.0 GiB", "3.0 TiB"]


def test_stats(live: hotmoe.Llama) -> None:
    assert live.expert_cache is not None
    stats = live.expert_cache.stats()
    assert (stats.decode.steps.tokens, stats.decode.steps.steps) == (24, 24)
    assert stats.prefill.steps.tokens + 24 == stats.total.steps.tokens
    assert stats.decode.events == 24 * N_LAYER
    assert stats.decode.hits + stats.decode.misses == 24 * N_LAYER * N_USED
    assert stats.decode.hit_rate == stats.decode.hits / (24 * N_LAYER * N_USED)
    assert stats.decode.misses > 0 and stats.decode.evictions > 0
    assert stats.decode.uploads == 3 * stats.decode.misses
    expert_bytes = live.expert_cache.plan.banks[0].expert_bytes
    assert stats.decode.uploaded_bytes == expert_bytes * stats.decode.misses
    assert stats.decode.uploaded_bytes_per_token == stats.decode.uploaded_bytes / 24
    assert stats.decode.policy_fallbacks == 0
    for field in ("events", "hits", "misses", "evictions", "uploads", "uploaded_bytes", "hook_ns"):
        layers = sum(getattr(layer, field) for layer in stats.total.layers)
        assert getattr(stats.total, field) == layers == getattr(stats.prefill, field) + getattr(stats.decode, field)
    assert [(layer.layer, layer.bank) for layer in stats.total.layers] == [(i, 0) for i in range(N_LAYER)]
    # the prompt needs up to 6 * 4 experts, which surely fit only into 24 slots; its last layer computes the last token alone
    assert stats.prefill.steps.bypassed["too_few_slots"] == 1
    assert [layer.events for layer in stats.prefill.layers] == [0, 1]
    assert stats.prefill.layers[0].hit_rate is None, "nothing was looked up"
    assert stats.decode.steps.bypassed == {"too_few_slots": 0, "warmup": 0, "cb_eval": 0}
    row = json.loads(json.dumps(stats.as_dict()))["decode"]
    assert row["hit_rate"] == stats.decode.hit_rate
    assert row["layers"][1]["layer"] == 1


def test_slot_map(live: hotmoe.Llama) -> None:
    assert live.expert_cache is not None
    for bank in range(N_LAYER):
        experts = live.expert_cache.slot_map(bank)
        assert len(experts) == len(set(experts)) == 12, "24 tokens have filled it"
        assert all(0 <= expert < N_EXPERT for expert in experts)
    for bank in (-1, N_LAYER):
        with pytest.raises(ArgumentError, match=rf"\[0, {N_LAYER}\)"):
            live.expert_cache.slot_map(bank)


def test_reset_and_clear(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, hotmoe.ExpertCache(slots=N_EXPERT)) as llm:
        cache = llm.expert_cache
        assert cache is not None
        llm.eval([5])
        resident = [cache.slot_map(bank) for bank in range(N_LAYER)]
        assert cache.stats().decode.misses == N_LAYER * N_USED
        cache.reset_stats()
        assert cache.stats().total.events == 0
        assert cache.stats().total.hit_rate is None
        assert [cache.slot_map(bank) for bank in range(N_LAYER)] == resident, "resetting counters keeps the experts"
        cache.clear()
        assert all(set(cache.slot_map(bank)) == {-1} for bank in range(N_LAYER))
        llm.reset()
        llm.eval([5])
        assert cache.stats().decode.misses == N_LAYER * N_USED
        llm.reset()
        llm.eval([5])
        assert cache.stats().decode.hits == N_LAYER * N_USED


def test_off_is_off(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=0)
    assert not cache.enabled
    with load(tiny_model, cache) as llm:
        llm.eval([5])
        assert str(cache.plan) == "expert cache: off"
        assert cache.plan.pool_bytes == 0
        assert cache.stats().total.events == cache.stats().total.steps.tokens == 0
        cache.reset_stats()
        cache.clear()


def test_sizes_in_bytes(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, hotmoe.ExpertCache(slots="4MiB")) as llm:
        assert llm.expert_cache is not None
        for device in llm.expert_cache.plan.devices:
            assert 0 < device.pool_bytes <= 4 << 20
            assert device.requested == "4MiB"
