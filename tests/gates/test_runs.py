"""Whole runs: every architecture, several contexts, several devices, long decodes, adapters."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import hotmoe
from hotmoe._native import lib
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests.harness import ALL, Pool, Runner, equal_bits, run_script, tokens_for
from tests.models import ARCHS, cached_model

MIXED: dict[str, dict[str, Any]] = {
    "mixed quantisation": {"arch": "qwen3moe", "quant": "Q4_K_M", "n_layer": 4},
    "one type per layer": {"arch": "olmoe", "per_layer_quant": ("Q8_0", "Q2_K"), "n_layer": 2},
    "fused, with a scale for down": {"arch": "gemma4", "scales": True},
    "no gate, with scales": {"arch": "nemotron_h_moe", "scales": True},
    "Mixtral with scales": {"arch": "llama", "scales": True},
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


@pytest.mark.parametrize("split", [(), (1.0, 3.0)])
def test_pool_lies_on_the_device_that_runs_the_layer(split: tuple[float, ...], sim: Any) -> None:
    """Layers over two devices, evenly and by tensor_split: a pool and a size for each (CASE 14)."""
    path = cached_model(arch="olmoe", quant="Q4_K", n_layer=4)
    both: dict[str, Any] = {"devices": ("SIM0", "SIM1"), "tensor_split": split}
    with Runner(path, **both) as offloaded, Runner(path, **both, cpu_moe=ALL) as hosted:
        tokens = tokens_for(24, hosted.n_vocab)
        expected = offloaded.run(tokens, 1)
        for mode in (0, 1, 2):
            hotmoe.sim.set_strict(mode, 5)
            for device in (0, 1):
                sim.reset_counters(device)
            with Pool(hosted, "5/9") as pool:
                assert equal_bits(hosted.run(tokens, 1), expected)
                slots = [pool.bank(i).n_slots for i in range(pool.n_banks)]
                assert slots == ([5, 5, 9, 9] if split else [5, 5, 5, 9])  # the output counts as a layer, too
                assert pool.stats().evictions > 0
            assert all(sim.counters(device).n_kernels > 0 for device in (0, 1))
            hotmoe.sim.set_strict(0)


def test_one_value_too_many_for_the_devices(sim: Any) -> None:
    with Runner(cached_model(), cpu_moe=ALL) as runner:
        pool = Pool(runner, "5/9/5")
        assert pool.status == lib.HOTMOE_ERR_ARGUMENT
        assert "3 values" in pool.error


def test_step_without_outputs(sim: Any) -> None:
    """A ubatch of which nothing is asked leaves the last layer without a token: no ids, no event there (CASE 3)."""
    path = cached_model(arch="olmoe", quant="Q4_K")
    with Runner(path) as offloaded, Runner(path, cpu_moe=ALL) as hosted:
        tokens = tokens_for(24, hosted.n_vocab)
        expected = offloaded.run(tokens, 3)
        for mode in (0, 1, 2):
            hotmoe.sim.set_strict(mode, 5)
            with Pool(hosted, 12) as pool:
                hosted.reset()
                for start in range(0, 12, 3):
                    hosted.decode(tokens[start : start + 3], outputs=False)
                last = pool.stats(bank=pool.n_banks - 1)
                assert last.events == 0
                assert not any(last.bypassed)
                assert pool.stats(bank=0).events == 4
                got = [hosted.decode(tokens[start : start + 3]).tobytes() for start in range(12, 24, 3)]
                assert b"".join(got) == expected[12:].tobytes()
            hotmoe.sim.set_strict(0)


def test_hits_and_misses_count_distinct_experts(sim: Any) -> None:
    """Two tokens of one ubatch that want the same expert are one access."""
    with Runner(cached_model(arch="olmoe", quant="Q4_K"), cpu_moe=ALL) as runner, Pool(runner, 40) as pool:
        runner.decode([300])
        one = pool.stats(bank=0)
        runner.reset()
        runner.decode([300, 300])  # layer 0: the same token at another place, mostly the same experts
        two = pool.stats(bank=0)
        assert one.hits + one.misses == 4
        assert 4 <= two.hits + two.misses - 4 < 8
        assert two.uploaded_bytes == two.misses * pool.bank(0).expert_bytes


def test_fresh_pool_is_zero_and_padded(sim: Any) -> None:
    """Kernels may read past the last row: no poison may lie there (the device fills new memory with NaN patterns)."""
    with Runner(cached_model(arch="olmoe", quant="Q4_K"), cpu_moe=ALL) as runner, Pool(runner, 6) as pool:
        for b in range(pool.n_banks):
            row = pool.bank(b)
            assert row.pool_bytes >= row.n_slots * row.expert_bytes + row.n_tensors * 512
            for t in range(row.n_tensors):
                assert all(not any(pool.read_slot(b, t, slot)) for slot in range(row.n_slots))


def test_parallel_sequences_decode_through_the_pool(sim: Any) -> None:
    """One token of each of four sequences is decode, and goes through the pool if its experts surely fit (CASE 12)."""
    path = cached_model(arch="olmoe", quant="Q4_K")
    with Runner(path, n_seq_max=4) as offloaded, Runner(path, n_seq_max=4, cpu_moe=ALL) as hosted, Pool(hosted, 16) as pool:
        for position, token in enumerate(tokens_for(12, hosted.n_vocab)):
            rows = [(token + sequence, position, sequence) for sequence in range(4)]
            logits = []
            for runner in (offloaded, hosted):
                runner.fill(rows)
                assert ll.llama_decode(runner.ctx, runner.batch) == 0
                logits.append([ctypes.string_at(ll.llama_get_logits_ith(runner.ctx, i), 4 * runner.n_vocab) for i in range(4)])
            assert logits[0] == logits[1]
        decode = pool.stats(phase=lib.HOTMOE_PHASE_DECODE)
        assert decode.events == 12 * pool.n_banks
        assert decode.evictions > 0
        assert pool.stats(phase=lib.HOTMOE_PHASE_PREFILL).events == 0


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
