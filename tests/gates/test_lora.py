"""LoRA adapters on expert tensors are indexed by the expert, not by its slot (CASE 5)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests.harness import ALL, Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model

N_EMBD, N_FF, N_EXPERT, RANK = 256, 256, 40, 4


def write_adapter(path: Path, arch: str, n_layer: int) -> None:
    """Write an adapter that changes every expert of every layer, each in its own way."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for il in range(n_layer):
        for name, n_in, n_out in (("gate", N_EMBD, N_FF), ("up", N_EMBD, N_FF), ("down", N_FF, N_EMBD)):
            tensor = f"blk.{il}.ffn_{name}_exps.weight"
            a = rng.normal(0, 0.05, (N_EXPERT, RANK, n_in)).astype(np.float32)
            b = rng.normal(0, 0.05, (N_EXPERT, n_out, RANK)).astype(np.float32)
            writer.add_tensor(f"{tensor}.lora_a", a)
            writer.add_tensor(f"{tensor}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def use_adapter(runner: Runner, path: Path) -> None:
    adapter = ll.llama_adapter_lora_init(runner.model, str(path).encode())
    assert adapter, "the adapter was not loaded"
    adapters = (ll.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert ll.llama_set_adapters_lora(runner.ctx, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0


def test_adapter_on_experts(tmp_path: Path, sim: Any) -> None:
    path = cached_model(arch="olmoe", quant="Q8_0")
    write_adapter(tmp_path / "adapter.gguf", "olmoe", 2)
    with Runner(path) as offloaded, Runner(path, cpu_moe=ALL) as hosted:
        tokens = tokens_for(24, hosted.n_vocab)
        plain = offloaded.run(tokens, 1)
        use_adapter(offloaded, tmp_path / "adapter.gguf")
        use_adapter(hosted, tmp_path / "adapter.gguf")
        for ubatch in (1, 3):
            expected = offloaded.run(tokens, ubatch)
            assert not equal_bits(expected, plain), "the adapter has no effect"
            with Pool(hosted, 4 * ubatch) as pool:
                assert equal_bits(hosted.run(tokens, ubatch), expected), f"ubatch {ubatch}"
                assert pool.stats().evictions > 0
