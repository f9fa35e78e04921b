"""What a policy costs is known (CASE 40): native ones by default, one call per function and event, and a bench that prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hotmoe
from hotmoe import EvictionPolicy, ExpertCache
from hotmoe.policies import registry

ROOT = Path(__file__).parent.parent


class Counting(EvictionPolicy):
    """Counts calls by method."""

    def __init__(self) -> None:
        self.calls = {"on_access": 0, "select_evict": 0, "on_evict_many": 0, "on_load_many": 0}

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        self.calls["on_access"] += 1

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> Any:
        self.calls["select_evict"] += 1
        return candidates[:n]

    def on_evict_many(self, layer: int, experts: Any, **kw: Any) -> None:
        self.calls["on_evict_many"] += 1

    def on_load_many(self, layer: int, experts: Any, slots: Any, **kw: Any) -> None:
        self.calls["on_load_many"] += 1


def test_the_default_is_native(sim: ModuleType, tiny_model: Path) -> None:
    with hotmoe.Llama(tiny_model, expert_cache=ExpertCache(slots=10), n_ctx=128, n_threads=1, verbose=False) as llm:
        assert llm.expert_cache is not None
        assert llm.expert_cache.policy in registry.POLICIES.native()
        assert llm.expert_cache.admission in registry.ADMISSIONS.native()
        assert llm.expert_cache.policy_object is None


def test_one_call_per_function_and_event(sim: ModuleType, tiny_model: Path) -> None:
    policy = Counting()
    with hotmoe.Llama(
        tiny_model, expert_cache=ExpertCache(slots=10, policy=policy), n_ctx=128, n_threads=1, verbose=False
    ) as llm:
        for token in range(300, 340):
            llm.eval([token])
        assert llm.expert_cache is not None
        total = llm.expert_cache.stats().total
    assert policy.calls["on_access"] == total.events == 80
    assert 0 < policy.calls["on_evict_many"] == policy.calls["select_evict"] <= policy.calls["on_load_many"] <= total.events
    assert total.evictions > policy.calls["on_evict_many"], "several experts went in one call"


def test_the_bench_prints_what_it_costs() -> None:
    """The numbers are there and of the right order; how fast a busy test machine is says nothing about a limit."""
    command = [sys.executable, "-m", "bench.policy_cost", "--repetitions", "1", "--tokens", "12", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    arms = {arm["policy"]: arm["us_per_event"] for arm in report["slot_map"]}
    assert {"lru", "lfru", "Lru (Python)"} <= set(arms)
    assert 0 < arms["lru"] < arms["Lru (Python)"] < 2000
    assert report["engine"].keys() >= {
        "us_added_per_event",
        "us_added_per_event_busy",
        "ms_added_per_token_of_48_layers",
        "ms_added_per_token_of_48_layers_busy",
    }
