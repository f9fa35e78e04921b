"""Beside the pool: what takes the stock path is stock, and the CPU alone agrees with stock llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

from hotmoe._native import lib
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests.harness import ALL, Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model

PATH = {"arch": "olmoe", "quant": "Q4_K"}


def test_bypassed_is_off(sim: Any) -> None:
    """A ubatch that does not fit takes the stock path: the same bits as without a cache, and it is counted."""
    with Runner(cached_model(**PATH), cpu_moe=ALL) as runner:
        tokens = tokens_for(48, runner.n_vocab)
        for ubatch in (16, 40):  # below and above the size at which ops on host weights move to the device
            off = runner.run(tokens, ubatch)
            with Pool(runner, 5) as pool:
                assert equal_bits(runner.run(tokens, ubatch), off)
                got, steps = pool.stats(), pool.steps()
                assert got.events == 0
                assert got.bypassed[lib.HOTMOE_BYPASS_TOO_FEW_SLOTS] == steps.steps * pool.n_banks
                assert steps.bypassed[lib.HOTMOE_BYPASS_TOO_FEW_SLOTS] == steps.steps == -(-len(tokens) // ubatch)


def test_prompt_on_stock_path_then_pool(sim: Any) -> None:
    with Runner(cached_model(**PATH), cpu_moe=ALL) as runner:
        prompt, rest = tokens_for(20, runner.n_vocab), tokens_for(20, runner.n_vocab, seed=1)

        def run() -> list[bytes]:
            runner.reset()
            out = [runner.decode(prompt).tobytes()]
            return out + [runner.decode([token]).tobytes() for token in rest]

        off = run()
        with Pool(runner, 5) as pool:
            assert run() == off
            prefill = pool.stats(phase=lib.HOTMOE_PHASE_PREFILL)
            decode = pool.stats(phase=lib.HOTMOE_PHASE_DECODE)
            assert prefill.bypassed[lib.HOTMOE_BYPASS_TOO_FEW_SLOTS] == pool.n_banks
            assert prefill.events == 0
            assert decode.events == len(rest) * pool.n_banks
            assert decode.evictions > 0


@pytest.mark.parametrize("quant", ["Q4_K", "Q4_0", "MXFP4"])  # all three are repacked by stock on AVX2
@pytest.mark.parametrize("ubatch", [1, 3, 8])
@pytest.mark.parametrize("share", ["smallest", "all"])
def test_cpu_alone(quant: str, ubatch: int, share: str, sim: Any) -> None:
    """On the CPU alone the pool equals stock with use_extra_bufts = false, byte for byte."""
    path = cached_model(arch="olmoe", quant=quant)
    with Runner(path, devices=(), extra_bufts=False) as stock:
        tokens = tokens_for(24, stock.n_vocab)
        expected = stock.run(tokens, ubatch)
    with (
        Runner(path, devices=(), extra_bufts=False, cpu_moe=ALL) as runner,
        Pool(runner, min(40, 4 * ubatch) if share == "smallest" else 40) as pool,
    ):
        assert equal_bits(runner.run(tokens, ubatch), expected)
        got = pool.stats()
        assert got.misses > 0
        assert (got.evictions > 0) == (share == "smallest")
        assert not pool.wrong_slots()
        assert not any(got.bypassed)


def test_repacked_experts_are_refused_with_the_reason(sim: Any) -> None:
    with Runner(cached_model(arch="olmoe", quant="Q4_0"), devices=(), mmap=False) as runner:
        pool = Pool(runner, 8)
        assert pool.status == lib.HOTMOE_ERR_PLAN
        assert "repacked" in pool.error
        assert "use_extra_bufts" in pool.error


def test_device_experts_are_refused_with_the_reason(sim: Any) -> None:
    with Runner(cached_model(**PATH)) as runner:
        pool = Pool(runner, 8)
        assert pool.status == lib.HOTMOE_ERR_PLAN
        assert "device memory already" in pool.error
        assert "cpu_moe" in pool.error


def test_warmup_is_left_out(sim: Any) -> None:
    """Warm-up activates all experts: it neither fills the pool nor counts as a step (CASE 30)."""
    with Runner(cached_model(**PATH), cpu_moe=ALL) as runner, Pool(runner, 40) as pool:
        ll.llama_set_warmup(runner.ctx, True)
        runner.decode([300])
        ll.llama_set_warmup(runner.ctx, False)
        got = pool.stats()
        assert got.events == got.misses == 0
        assert got.bypassed[lib.HOTMOE_BYPASS_WARMUP] == pool.n_banks
        assert pool.steps().steps == 0
        assert set(pool.slot_map(0)) == {-1}
        runner.decode([300])
        assert pool.stats().misses > 0


def test_eval_callback_sees_expert_ids(sim: Any) -> None:
    """Under an eval callback the pool is off, since the callback reads src[2] of mul_mat_id."""
    seen = []

    @ll.ggml_backend_sched_eval_callback
    def callback(tensor: int, ask: bool, user_data: int) -> bool:
        seen.append(ask)
        return not ask

    path = cached_model(**PATH)
    with Runner(path, cpu_moe=ALL) as plain:
        tokens = tokens_for(6, plain.n_vocab)
        expected = plain.run(tokens, 1)
    with Runner(path, cpu_moe=ALL, cb_eval=callback) as runner, Pool(runner, 8) as pool:
        assert equal_bits(runner.run(tokens, 1), expected)
        assert seen
        got = pool.stats()
        assert got.events == 0
        assert got.bypassed[lib.HOTMOE_BYPASS_CB_EVAL] == len(tokens) * pool.n_banks
