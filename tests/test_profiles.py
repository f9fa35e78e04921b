"""Profiles: what the policy `static` keeps, from a trace or an imatrix."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest

import hotmoe
from hotmoe.errors import PolicyError
from hotmoe.policies.profile import profile_as_pins, read_profile
from hotmoe.replay import replay
from hotmoe.traces import Trace

OLMOE = Path(__file__).parent / "traces" / "olmoe-1b-7b-0125_top8.csv"


def imatrix(path: Path, counts: dict[int, list[float]]) -> Path:
    """Write the part of an imatrix that is about experts, as llama-imatrix lays it out."""
    writer = gguf.GGUFWriter(path, "imatrix")
    for layer, values in counts.items():
        for part in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            writer.add_tensor(f"{name}.in_sum2", np.ones((len(values), 32), np.float32))
            writer.add_tensor(f"{name}.counts", np.array(values, np.float32).reshape(-1, 1))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_most_used_of_a_trace_come_first() -> None:
    trace = Trace.load(OLMOE)
    profile = read_profile(OLMOE)
    assert sorted(profile) == list(range(16))
    for layer, experts in profile.items():
        uses = np.bincount(trace.experts[trace.layer == layer].ravel(), minlength=64)
        assert [int(uses[e]) for e in experts] == sorted(uses[uses > 0].tolist(), reverse=True)


def test_an_imatrix(tmp_path: Path) -> None:
    file = imatrix(tmp_path / "imatrix.gguf", {0: [5, 0, 9, 7], 2: [0, 1, 0, 0]})
    assert read_profile(file) == {0: [2, 3, 0], 2: [1]}
    assert profile_as_pins(file) == "0:2 3 0;2:1"


def test_a_profile_of_the_same_routing_beats_a_wrong_one(tmp_path: Path) -> None:
    trace = Trace.load(OLMOE)
    right = replay(trace, f"static(profile={OLMOE})", slots="25%")
    wrong = imatrix(tmp_path / "wrong.gguf", {layer: list(range(64)) for layer in range(16)})
    assert right.policy == f"static(profile={OLMOE})"
    assert right.hit_rate > replay(trace, f"static(profile={wrong})", slots="25%").hit_rate + 0.05


def test_in_the_engine(sim: ModuleType, tiny_model: Path, tmp_path: Path) -> None:
    file = imatrix(tmp_path / "imatrix.gguf", {0: [40.0 - e for e in range(40)], 1: [e + 1.0 for e in range(40)]})
    cache = hotmoe.ExpertCache(slots=12, policy=f"static(profile={file})")
    with hotmoe.Llama(tiny_model, expert_cache=cache, n_ctx=128, n_threads=1, verbose=False) as llm:
        llm("hello", max_tokens=40, temperature=0)
        kept = [sorted(cache.slot_map(bank)) for bank in range(2)]
    assert sum(kept[0]) < sum(range(40)) * 12 / 40 < sum(kept[1]), "low ids stay in layer 0, high ones in layer 1"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("static(profile=/no/such/file.npz)", "does not exist"),
        (f"static(profile={OLMOE}, pins=3)", "all other options"),
        (f"static(profile={__file__})", "profile"),
    ],
)
def test_bad_profiles(spec: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        hotmoe.ExpertCache(policy=spec)


def test_an_imatrix_without_experts(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="tells nothing"):
        read_profile(imatrix(tmp_path / "dense.gguf", {}))
