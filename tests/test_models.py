"""The generator of tiny models: bytes that depend on the spec only, and files that say what they were asked to say."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from tests.models import (
    ARCHS,
    BREAKS,
    QUANTS,
    break_model,
    cached_model,
    find_library,
    link_model,
    make_model,
    model_files,
    resolve,
)

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"n_expert": 8, "n_expert_used": 2, "quant": "Q8_0"}

try:
    find_library()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


def _tensors(path: Path) -> dict[str, Any]:
    return {t.name: t for file in model_files(path) for t in GGUFReader(file).tensors}


def _types(path: Path, part: str) -> Counter[str]:
    return Counter(t.tensor_type.name for name, t in _tensors(path).items() if part in name)


def _digest(path: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in model_files(path))).hexdigest()


@pytest.mark.parametrize("arch", ARCHS)
def test_same_spec_gives_the_same_bytes(tmp_path: Path, arch: str) -> None:
    one, two = (make_model(tmp_path / f"{i}.gguf", arch=arch, **SMALL) for i in (1, 2))
    other = make_model(tmp_path / "3.gguf", arch=arch, seed=1, **SMALL)
    assert _digest(one) == _digest(two)
    assert _digest(one) != _digest(other)


@pytest.mark.parametrize("arch", ARCHS)
def test_metadata(tmp_path: Path, arch: str) -> None:
    reader = GGUFReader(make_model(tmp_path / "m.gguf", arch=arch, **SMALL))
    assert reader.fields["general.architecture"].contents() == arch
    assert reader.fields[f"{arch}.expert_count"].contents() == 8
    assert np.max(reader.fields[f"{arch}.expert_used_count"].contents()) == 2
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 512


@pytest.mark.parametrize("quant", QUANTS)
def test_expert_types(tmp_path: Path, quant: str) -> None:
    path = make_model(tmp_path / "m.gguf", **{**SMALL, "quant": quant})
    assert _types(path, "_exps.weight") == {quant: 6}
    assert _types(path, "ffn_gate_inp") == {"F32": 2}


def test_mixes_as_real_files_have_them(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", **{**SMALL, "quant": "Q4_K_M", "n_layer": 3})
    assert [_tensors(path)[f"blk.{il}.ffn_down_exps.weight"].tensor_type.name for il in range(3)] == [
        "Q4_K",
        "Q4_K",
        "Q6_K",
    ]
    mixed = make_model(tmp_path / "n.gguf", per_layer_quant=[{"gate": "Q4_0", "up": "Q8_0", "down": "Q3_K"}, "Q2_K"], **SMALL)
    assert _types(mixed, "_exps.weight") == {"Q4_0": 1, "Q8_0": 1, "Q3_K": 1, "Q2_K": 3}


def test_variants(tmp_path: Path) -> None:
    fused = _tensors(make_model(tmp_path / "f.gguf", arch="gemma4", scales=True, **SMALL))
    assert "blk.0.ffn_gate_up_exps.weight" in fused
    assert sorted(n for n in fused if n.endswith("exps.scale")) == [
        "blk.0.ffn_down_exps.scale",
        "blk.1.ffn_down_exps.scale",
    ]
    scaled = _tensors(make_model(tmp_path / "s.gguf", arch="qwen3moe", scales=True, **SMALL))
    assert sum(n.endswith("exps.scale") for n in scaled) == 6
    ungated = _tensors(make_model(tmp_path / "u.gguf", arch="nemotron_h_moe", **SMALL))
    assert not any("gate_exps" in name for name in ungated)
    biased = _tensors(make_model(tmp_path / "b.gguf", arch="gpt-oss", **SMALL))
    assert np.abs(biased["blk.1.ffn_up_exps.bias"].data).mean() > 0.3


def test_fused_and_separate_hold_the_same_weights(tmp_path: Path) -> None:
    fused, separate = (
        _tensors(make_model(tmp_path / f"{x}.gguf", arch="deepseek2", layout=x, **SMALL)) for x in ("fused", "separate")
    )
    gate, up = (separate[f"blk.1.ffn_{x}_exps.weight"].data for x in ("gate", "up"))
    assert np.array_equal(fused["blk.1.ffn_gate_up_exps.weight"].data, np.concatenate([gate, up], axis=1))


@pytest.mark.parametrize("quant", [q for q in QUANTS if q != "F16"])
def test_quantised_values_are_near_the_originals(tmp_path: Path, quant: str) -> None:
    full = _tensors(make_model(tmp_path / "f.gguf", **{**SMALL, "quant": "F16"}))
    path = make_model(tmp_path / "q.gguf", **{**SMALL, "quant": quant})
    name = "blk.0.ffn_down_exps.weight"
    tensor = _tensors(path)[name]
    values = dequantize(tensor.data, tensor.tensor_type)
    error = np.std(values - full[name].data.astype(np.float32)) / np.std(values)
    assert error < 0.4


def test_shards(tmp_path: Path) -> None:
    whole = make_model(tmp_path / "m.gguf", **SMALL)
    first = make_model(tmp_path / "m.gguf", shards=3, **SMALL)
    assert first.name == "m-00001-of-00003.gguf"
    files = model_files(first)
    assert [GGUFReader(f).fields["split.no"].contents() for f in files] == [0, 1, 2]
    assert GGUFReader(first).fields["split.tensors.count"].contents() == len(_tensors(whole))
    parts = _tensors(first)
    assert all(np.array_equal(t.data, parts[name].data) for name, t in _tensors(whole).items())


def test_default_experts_outnumber_a_ubatch_of_eight() -> None:
    assert resolve(n_expert_used=4).n_expert == 40


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "gpt2"},
        {"arch": "olmoe", "scales": True},
        {"arch": "qwen3moe", "layout": "fused"},
        {"arch": "deepseek2", "n_layer": 1},
        {"arch": "nemotron_h_moe", "n_layer": 1},
        {"quant": "Q4_K", "n_ff_exp": 320},
        {"quant": "Q9"},
        {"n_expert": 4, "n_expert_used": 5},
        {"per_layer_quant": ["Q8_0"]},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_impossible_specs_say_why(options: dict[str, Any]) -> None:
    value = list(options.values())[-1]
    with pytest.raises(ValueError, match=str(value) if isinstance(value, int | str) else "per_layer_quant"):
        resolve(**options)


def test_cache_keeps_one_model_per_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTMOE_TEST_CACHE", str(tmp_path))
    first = cached_model(shards=2, **SMALL)
    made = first.stat().st_mtime_ns
    assert cached_model(shards=2, **SMALL) == first
    assert first.stat().st_mtime_ns == made
    assert cached_model(shards=2, seed=1, **SMALL) != first
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", BREAKS)
def test_broken_copies(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "m.gguf", shards=2, **SMALL)
    before = _digest(model)
    path = break_model(model, kind, tmp_path / "broken")
    assert path.exists()
    assert _digest(model) == before
    if kind.startswith("expert-"):
        fields = GGUFReader(path).fields
        counts = {k: fields[f"qwen3moe.expert_{k}"].contents() for k in ("count", "used_count")}
        assert (
            counts
            == {
                "expert-used-0": {"count": 8, "used_count": 0},
                "expert-used-above": {"count": 8, "used_count": 9},
                "expert-count-1025": {"count": 1025, "used_count": 2},
            }[kind]
        )


def test_linked_shards(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.gguf", shards=2, **SMALL)
    linked = link_model(model, tmp_path / "cache")
    assert linked.is_symlink()
    assert _digest(linked) == _digest(model)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("arch", ARCHS)
def test_loads_and_gives_logits(arch: str, shards: int) -> None:
    hotmoe = pytest.importorskip("hotmoe", reason="needs the built package", exc_type=ImportError)
    path = cached_model(arch=arch, shards=shards, **SMALL)
    llama = hotmoe.Llama(str(path), n_ctx=256, n_threads=2, logits_all=True, verbose=False)
    llama.eval(llama.tokenize(b"ba de fi"))
    logits = np.array(llama.scores[: llama.n_tokens])
    llama.close()
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
