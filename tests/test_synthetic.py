"""Synthetic models: the routing is the one that was prescribed, and the weights are weights."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from bench._blocks import BLOCKS, N_BLOCKS, Weights
from bench._routing import recorded, skewed
from bench.synthetic import Synthetic, cached_synthetic, hit_rates, make_synthetic, resolve, verify
from hotmoe import Llama
from hotmoe.traces import Trace

TRACE = """# meta=n_expert=16 n_expert_used=3
phase,token,layer,experts
prefill,0,0,1 2 3
prefill,0,1,4 5 6
prefill,1,0,3 2 1
prefill,1,1,7 8 9
prefill,1,2,0 1 2
decode,2,0,15 14 13
decode,2,1,12 0 11
decode,2,2,5 6 7
"""


@pytest.fixture(scope="module")
def tiny() -> Synthetic:
    return cached_synthetic(zipf=0.8)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def _llama(path: Path, **options: Any) -> Llama:
    return Llama(path, n_gpu_layers=0, n_ctx=64, n_threads=1, verbose=False, **options)


def _logits(path: Path, tokens: list[int]) -> Any:
    with _llama(path, logits_all=True) as llm:
        llm.eval(tokens)
        return llm.scores[: len(tokens)].copy()


@pytest.mark.parametrize("quant", BLOCKS)
def test_routing_is_the_prescribed_one(quant: str) -> None:
    shares = verify(cached_synthetic(quant=quant, zipf=0.8), n_tokens=128)
    assert min(shares.values()) > 0.99, shares


def test_the_comparison_sees_another_routing(tiny: Synthetic) -> None:
    experts = (tiny.routing.experts + 1) % tiny.routing.n_expert
    shares = verify(dataclasses.replace(tiny, routing=dataclasses.replace(tiny.routing, experts=experts)), n_tokens=16)
    assert max(shares.values()) < 0.2


def test_routing_of_a_trace(trace_file: Path, tmp_path: Path) -> None:
    model = make_synthetic(tmp_path / "m.gguf", trace=str(trace_file))
    assert (model.spec.n_layer, model.spec.n_expert, model.spec.n_expert_used, model.spec.tokens) == (3, 16, 3, 3)
    assert model.routing.experts[1].tolist() == [[3, 2, 1], [7, 8, 9], [0, 1, 2]]
    assert model.routing.prescribed.tolist() == [[True, True, False], [True] * 3, [True] * 3]
    assert verify(model) == {"decode": 1.0, "decode_order": 1.0, "prefill": 1.0, "prefill_order": 1.0}


def test_part_of_a_trace(trace_file: Path) -> None:
    routing = recorded(Trace.load(trace_file), n_tokens=2, n_layer=2, top_k=2)
    assert routing.experts.tolist() == [[[1, 2], [0, 1]], [[3, 2], [0, 1]]]
    with pytest.raises(ValueError, match="4 tokens are asked for, it has 3"):
        recorded(Trace.load(trace_file), n_tokens=4)


def test_skew_and_locality_make_hits() -> None:
    shape: dict[str, Any] = {"n_tokens": 200, "n_layer": 3, "n_expert": 32, "top_k": 4}
    flat, skew, local = (
        hit_rates(skewed(**shape, zipf=z, locality=x), (25,))["25%"] for z, x in ((0, 0.0), (1.2, 0.0), (0, 0.8))
    )
    assert flat == pytest.approx(0.25, abs=0.04)
    assert skew > flat + 0.15
    assert local > flat + 0.4
    used = skewed(**shape, zipf=1.2).experts
    assert all(len(set(row)) == 4 for row in used.reshape(-1, 4).tolist())
    hottest = [np.bincount(used[:, layer].ravel(), minlength=32).argmax() for layer in range(3)]
    assert len(set(hottest)) > 1, "layers have orders of their own"


@pytest.mark.parametrize("quant", BLOCKS)
def test_blocks_are_valid_and_of_the_size_that_was_asked_for(quant: str, tmp_path: Path) -> None:
    model = make_synthetic(tmp_path / "m.gguf", quant=quant)
    tensors = {t.name: t for t in GGUFReader(model.path).tensors}
    for name, std in (("ffn_gate_exps", 256**-0.5), ("ffn_down_exps", 0.1 / 8**0.5 / 0.6 * 256**-0.5)):
        tensor = tensors[f"blk.1.{name}.weight"]
        assert tensor.tensor_type.name == quant
        values = dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(std, rel=0.06)
        assert abs(values.mean()) < 0.15 * std


def test_no_two_experts_are_equal(tiny: Synthetic) -> None:
    seen = set()
    tensors = [t for t in GGUFReader(tiny.path).tensors if "_exps" in t.name]
    for tensor in tensors:
        seen.update(hashlib.sha256(expert.tobytes()).digest() for expert in tensor.data)
    assert len(seen) == len(tensors) * tiny.spec.n_expert == 3 * 4 * 32


def test_a_stretch_goes_round() -> None:
    weights = Weights("Q8_0", 1.0, seed=0)
    size = 34
    whole = b"".join(weights.stretch(7, N_BLOCKS * size))
    assert len(whole) == N_BLOCKS * size
    assert b"".join(weights.stretch(7 + N_BLOCKS, 3 * len(whole) // 2)) == (whole + whole)[: 3 * len(whole) // 2]
    assert b"".join(weights.stretch(9, size)) == whole[2 * size : 3 * size]


def test_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    digests = [
        hashlib.sha256(make_synthetic(tmp_path / f"{i}.gguf", **options).path.read_bytes()).hexdigest()
        for i, options in enumerate([{}, {}, {"seed": 1}, {"zipf": 0.5}, {"locality": 0.5}])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert cached_synthetic().path == cached_synthetic().path != cached_synthetic(seed=1).path


def test_shards_hold_the_same_model(tiny: Synthetic, tmp_path: Path) -> None:
    sharded = make_synthetic(tmp_path / "m.gguf", zipf=0.8, shards=3)
    assert [file.name for file in sharded.files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    tokens = tiny.tokens(8)
    assert np.array_equal(_logits(sharded.path, tokens), _logits(tiny.path, tokens))


def test_a_wrong_expert_changes_the_logits(tiny: Synthetic, tmp_path: Path) -> None:
    tokens = tiny.tokens(6)
    right = _logits(tiny.path, tokens)
    assert np.isfinite(right).all()
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(tiny.path.read_bytes())
    experts = {t.name: t for t in GGUFReader(wrong, "r+").tensors}["blk.0.ffn_down_exps.weight"].data
    used = int(tiny.routing.experts[0, 0, 0])
    other = (used + 1) % tiny.spec.n_expert
    experts[[used, other]] = experts[[other, used]]
    experts.flush()
    assert np.abs(_logits(wrong, tokens)[0] - right[0]).max() > 1e-3


def test_greedy_generation_and_text_replay(tiny: Synthetic) -> None:
    with _llama(tiny.path) as llm:
        assert llm.tokenize(b"0 1 2 30 255", add_bos=True) == [0, 1, 2, 30, 255]
        assert list(itertools.islice(llm.generate([5], temp=0), 20)) == list(range(6, 26))
        llm.reset()
        assert list(itertools.islice(llm.generate([254], temp=0), 3)) == [255, 0, 1]
        assert llm.token_eos() == tiny.spec.tokens + 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shape": "huge"}, "'huge' is not one of .*tiny"),
        ({"quant": "Q5_1"}, "'Q5_1' is not one of Q4_0, Q8_0, Q4_K"),
        ({"tokens": 257}, "tokens 257 must be at most n_embd 256"),
        ({"n_ff_exp": 128}, "n_ff_exp 128 must be a multiple of 256 for Q4_K"),
        ({"n_expert_used": 33}, "top_k 33 must be at least 1 and at most n_expert 32"),
        ({"locality": 1.0}, r"locality 1\.0 must be in \[0, 1\)"),
        ({"n_head": 3, "head_dim": 256}, "n_head 3 must be a multiple of n_head_kv 2"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve(**options)


def test_a_real_shape_has_its_real_size() -> None:
    spec, routing = resolve(shape="qwen3-30b-a3b", tokens=8)
    assert routing.experts.shape == (8, 48, 8)
    assert spec.n_layer * spec.n_expert * spec.expert_bytes == 16_307_453_952  # 29 of the 30.5 billion parameters at 4.5 bits


def test_shards_have_a_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards 99 must not exceed the 51 tensors"):
        make_synthetic(tmp_path / "m.gguf", shards=99)


def test_sizes_are_those_of_the_file(tiny: Synthetic) -> None:
    experts = [t for t in GGUFReader(tiny.path).tensors if "_exps" in t.name]
    assert sum(t.n_bytes for t in experts) == tiny.n_bytes - tiny.dense_bytes
    assert tiny.spec.used_bytes_per_token == 4 * 4 * sum(t.n_bytes for t in experts if "blk.0." in t.name) // 32
