"""Whole runs: every architecture, several contexts, several devices, long decodes, adapters."""

from __future__ import annotations

from typing import Any

import pytest

import hotmoe
from hotmoe._native import lib
from tests.harness import ALL, Pool, Runner, equal_bits, run_script, tokens_for
from tests.models import ARCHS, cached_model

MIXED: dict[str, dict[str, Any]] = {
    "mixed quantisation": {"arch": "qwen3moe", "quant": "Q4_K_M", "n_layer": 4},
    "one type per layer": {"arch": "olmoe", "per_layer_quant": ("Q8_0", "Q2_K"), "n_layer": 2},
    "three shards": {"arch": "olmoe", "quant": "Q6_K", "shards": 3},
    "Q4_0, which the CPU would repack": {"arch": "olmoe", "quant": "Q4_0"},
}
CASES = {name: {"arch": name} for name in ARCHS} | MIXED


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [0, 2])
def test_architectures(case: str, mode: int, sim: Any) -> None:
    path = cached_model(**CASES[case])
    hotmoe.sim.set_strict(mode, 11)
    try:
        with Runner(path) as offloaded, Runner(path, cpu_moe=ALL) as hosted:
            tokens = tokens_for(24, hosted.n_vocab)
            for ubatch in (1, 8):
                expected = offloaded.run(tokens, ubatch)
                with Pool(hosted, 4 * ubatch) as pool:
                    assert equal_bits(hosted.run(tokens, ubatch), expected), f"ubatch {ubatch}"
                    got = pool.stats()
                    assert got.evictions > 0
                    assert not any(got.bypassed)
                    assert not pool.wrong_slots()
    finally:
        hotmoe.sim.set_strict(0)


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu", "fifo"])
def test_every_policy_is_exact(policy: str, sim: Any) -> None:
    path = cached_model(arch="olmoe", quant="Q4_K")
    with Runner(path) as offloaded, Runner(path, cpu_moe=ALL) as hosted:
        tokens = tokens_for(96, hosted.n_vocab)
        expected = offloaded.run(tokens, 1)
        with Pool(hosted, 10, policy) as pool:
            assert equal_bits(hosted.run(tokens, 1), expected)
            got = pool.stats()
            assert got.evictions > 0
            assert got.hits > 0


def test_interleaved_contexts_equal_their_solo_runs(sim: Any) -> None:
    """Two contexts over one model, each with its own pool (CASES 7 and 8)."""
    path = cached_model(arch="qwen3moe", quant="Q4_K")
    with Runner(path) as offloaded:
        first, second = (tokens_for(24, offloaded.n_vocab, seed) for seed in (1, 2))
        expected = [offloaded.run(first, 1), offloaded.run(second, 1)]
    for mode in (0, 1, 2):
        hotmoe.sim.set_strict(mode, 5)
        with Runner(path, cpu_moe=ALL) as a, Runner.sharing(a) as b, Pool(a, 5) as pool_a, Pool(b, 9) as pool_b:
            got_a, got_b = [], []
            for token_a, token_b in zip(first, second, strict=True):
                got_a.append(a.decode([token_a]).tobytes())
                got_b.append(b.decode([token_b]).tobytes())
            assert b"".join(got_a) == expected[0].tobytes()
            assert b"".join(got_b) == expected[1].tobytes()
            assert pool_a.stats().evictions > 0
            assert pool_b.stats().evictions > 0
        hotmoe.sim.set_strict(0)


def test_pool_lies_on_the_device_that_runs_the_layer(sim: Any) -> None:
    """Layers over two devices: a pool and a size for each (CASE 14)."""
    path = cached_model(arch="olmoe", quant="Q4_K", n_layer=4)
    both = ("SIM0", "SIM1")
    with Runner(path, devices=both) as offloaded, Runner(path, devices=both, cpu_moe=ALL) as hosted:
        tokens = tokens_for(24, hosted.n_vocab)
        expected = offloaded.run(tokens, 1)
        for mode in (0, 1, 2):
            hotmoe.sim.set_strict(mode, 5)
            for device in (0, 1):
                sim.reset_counters(device)
            with Pool(hosted, "5/9") as pool:
                assert equal_bits(hosted.run(tokens, 1), expected)
                rows = [pool.bank(i) for i in range(pool.n_banks)]
                assert {bytes(b"".join(row.device)).partition(b"\0")[0]: row.n_slots for row in rows} == {b"SIM0": 5, b"SIM1": 9}
                assert pool.stats().evictions > 0
            assert all(sim.counters(device).n_kernels > 0 for device in (0, 1))
            hotmoe.sim.set_strict(0)


def test_one_value_too_many_for_the_devices(sim: Any) -> None:
    with Runner(cached_model(), cpu_moe=ALL) as runner:
        pool = Pool(runner, "5/9/5")
        assert pool.status == lib.HOTMOE_ERR_ARGUMENT
        assert "3 values" in pool.error


def test_second_cache_is_refused_and_a_new_one_fits_after_free(sim: Any) -> None:
    with Runner(cached_model(), cpu_moe=ALL) as runner, Pool(runner, 8) as pool:
        second = Pool(runner, 8)
        assert second.status == lib.HOTMOE_ERR_STATE
        pool.close()
        with Pool(runner, 8):
            runner.decode([300])


def test_pool_memory_goes_back(sim: Any) -> None:
    with Runner(cached_model(), cpu_moe=ALL) as runner:
        runner.decode([300])
        before = sim.counters(0).allocated_bytes
        for _ in range(3):
            with Pool(runner, 40) as pool:
                runner.decode([301])
                size = sum(pool.bank(i).pool_bytes for i in range(pool.n_banks))
                assert sim.counters(0).allocated_bytes >= size
        runner.decode([302])
        assert sim.counters(0).allocated_bytes <= before + 4096


def test_cache_outlives_its_context(sim: Any) -> None:
    runner = Runner(cached_model(), cpu_moe=ALL)
    pool = Pool(runner, 8)
    runner.decode([300])
    runner.close()
    pool.close()


LONG_RUN = """
    import sys
    import hotmoe
    hotmoe.sim.load(1, mib=512)
    from tests.harness import ALL, Pool, Runner, tokens_for
    from tests.models import cached_model

    path = cached_model(arch="olmoe", quant="Q4_K")
    n = 2000
    with Runner(path, n_ctx=2304) as offloaded, Runner(path, n_ctx=2304, cpu_moe=ALL) as hosted:
        with Pool(hosted, 4) as pool:
            tokens = tokens_for(n, hosted.n_vocab)
            for i, token in enumerate(tokens):
                expected = offloaded.decode([token])
                if hosted.decode([token]).tobytes() != expected.tobytes():
                    sys.exit(f"token {i} differs")
            got, steps = pool.stats(), pool.steps()
            assert got.events == n * pool.n_banks and got.evictions > n
            assert steps.steps == n
            print("graphs built:", steps.graphs_built)
"""


def test_2000_tokens_at_the_smallest_pool() -> None:
    """As CASE 3: long decode at the smallest legal pool equals the resident run, and never reallocates its graph."""
    output = run_script(LONG_RUN, GGML_SCHED_DEBUG_REALLOC="1")
    # the attention mask grows every 256 tokens: that many graphs, not one per token
    graphs = int(output.split("graphs built:")[1])
    assert graphs < 20
