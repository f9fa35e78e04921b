"""Where the loader hook puts expert weights: by what they are, fused or not, and nothing else moves with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotmoe._native import lib
from tests.harness import ALL, Pool, Runner, tokens_for
from tests.models import cached_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "separate": {"arch": "olmoe"},
    "fused": {"arch": "gemma4"},
    "biases": {"arch": "gpt-oss"},
    "scales": {"arch": "qwen3moe", "scales": True},
    "shared experts": {"arch": "deepseek2"},
    "repacked by stock": {"arch": "olmoe", "quant": "Q4_0"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_hit_decode_stays_on_the_device(layout: str, sim: Any) -> None:
    """With every expert resident a token reads back the ids of each layer and the logits, and no activation.

    An expert tensor that was missed (CASE 20), or a bias or scale that went to the host with the weights, would make the
    CPU compute, and its inputs would have to be copied.
    """
    with Runner(cached_model(**LAYOUTS[layout]), cpu_moe=ALL) as runner, Pool(runner, 40) as pool:
        tokens = tokens_for(8, runner.n_vocab)
        runner.run(tokens, 1)
        pool.reset_stats()
        sim.reset_counters(0)
        runner.run(tokens, 1)
        got, device = pool.stats(), sim.counters(0)
        assert got.misses == 0
        assert device.n_d2h == len(tokens) * (pool.n_banks + 1)
        assert device.d2h_bytes == len(tokens) * (
            4 * runner.n_vocab + 4 * sum(pool.bank(i).n_expert_used for i in range(pool.n_banks))
        )


@pytest.mark.parametrize("n", [0, 1, 2])
def test_first_layers_only(n: int, sim: Any) -> None:
    """n_cpu_moe = n pools the first n MoE layers and says why it leaves out the others."""
    with Runner(cached_model(arch="olmoe"), cpu_moe=n) as runner:
        pool = Pool(runner, 8, strict=False)
        if n == 0:
            assert pool.status == lib.HOTMOE_ERR_PLAN
            return
        states = [pool.bank(i).state for i in range(pool.n_banks)]
        assert states == [lib.HOTMOE_BANK_POOLED] * n + [lib.HOTMOE_BANK_LEFT_OUT] * (2 - n)
        runner.run(tokens_for(8, runner.n_vocab), 1)
        assert pool.stats().events == 8 * n
        pool.close()
        strict = Pool(runner, 8, strict=True)
        assert (strict.status == 0) == (n == 2)
        strict.close()


def test_file_mapping_serves_the_experts(sim: Any) -> None:
    """With mmap the experts stay in the file's pages: no copy of them is made in host memory."""
    path = cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64)
    with Runner(path, cpu_moe=ALL) as runner, Pool(runner, 8) as pool:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
        mapped = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        for bank in range(pool.n_banks):
            address = pool.host_address(bank, 0, 63)
            assert any(first <= address < last for first, last in mapped)
