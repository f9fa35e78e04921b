"""Devices, tensor overrides and the progress of a load (CASES 20 and 22)."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotmoe
from hotmoe._placement import _parse_overrides
from hotmoe.errors import ArgumentError, LoadCancelledError
from tests.models import cached_model

EXPERTS = r"\.ffn_(up|gate|down)_exps"


def load(path: Path, **options: Any) -> hotmoe.Llama:
    return hotmoe.Llama(path, **{"n_ctx": 64, "n_batch": 4, "n_threads": 1, "n_gpu_layers": -1, "verbose": False, **options})


def used(sim: ModuleType, path: Path, **options: Any) -> tuple[int, int]:
    """Return the bytes that a loaded model has on SIM0 and SIM1; op_offload would add room for experts of the host."""
    with load(path, op_offload=False, **options) as llm:
        assert llm("hello", max_tokens=2)["choices"]
        return sim.counters(0).allocated_bytes, sim.counters(1).allocated_bytes


def test_devices(sim: ModuleType, tiny_model: Path) -> None:
    both, first, second = (used(sim, tiny_model, devices=names) for names in (None, ["SIM0"], "SIM1"))
    assert min(both) > 0
    assert first[0] > 0 and first[1] == 0
    assert second == (0, first[0])
    assert used(sim, tiny_model, devices=[]) == (0, 0)
    assert used(sim, tiny_model, devices="SIM1, SIM0") == both[::-1]


@pytest.mark.parametrize("name", ["CUDA7", "CPU", "sim0"])
def test_unknown_devices(sim: ModuleType, tiny_model: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"no device '{name}'.*known: SIM0, SIM1"):
        load(tiny_model, devices=["SIM0", name])


def test_overrides(sim: ModuleType, tiny_model: Path) -> None:
    resident = used(sim, tiny_model, devices="SIM0")
    hosted = used(sim, tiny_model, devices="SIM0", cpu_moe=True)
    assert hosted < resident
    forms: list[Any] = [{EXPERTS: "CPU"}, [(EXPERTS, "CPU")], f"{EXPERTS}=CPU"]
    for overrides in forms:
        assert used(sim, tiny_model, devices="SIM0", override_tensors=overrides) == hosted
    assert used(sim, tiny_model, override_tensors={"^blk": "SIM1", ".": "SIM0"})[1] > 0
    first = {rf"blk\.0{EXPERTS}": "SIM0"}
    assert hosted < used(sim, tiny_model, devices="SIM0", override_tensors=first, cpu_moe=True) < resident, (
        "the user's come first"
    )
    assert used(sim, tiny_model, devices="SIM0", override_tensors=first, n_cpu_moe=1) == resident


def test_overridden_experts_can_be_pooled(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, expert_cache=hotmoe.ExpertCache(slots=8)) as llm:
        expected = llm("hello", max_tokens=8, temperature=0)["choices"]
    cache = hotmoe.ExpertCache(slots=8)
    with load(tiny_model, expert_cache=cache, cpu_moe=False, override_tensors=f"{EXPERTS}=CPU") as llm:
        assert cache.plan.slots == (8,), "Q4_K in host memory is not repacked"
        assert llm("hello", max_tokens=8, temperature=0)["choices"] == expected
        assert cache.stats().decode.events > 0


def test_strings_and_terminator_outlive_the_call(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, override_tensors={f"{EXPERTS}{'|x' * i}": "CPU" for i in range(40)}) as llm:
        gc.collect()
        rows = llm._load_options._overrides
        assert len(rows) == 41 and rows[40].pattern is None and not rows[40].buft
        assert [row.pattern.decode() for row in rows[:40]] == [f"{EXPERTS}{'|x' * i}" for i in range(40)]
        assert len({row.buft for row in rows[:40]}) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"x": "CUDA7"}, "no buffer or device 'CUDA7'; known: CPU, SIM0, SIM_Host, SIM1"),
        ("ffn_up", "expected 'pattern=buffer'"),
        ("ffn_up=", "expected 'pattern=buffer'"),
        ({"(": "CPU"}, "not a regular expression"),
        ([("a", "b", "c")], "expected a pattern and the name"),
        ([("a", 3)], "expected a pattern and the name"),
    ],
)
def test_wrong_overrides(sim: ModuleType, tiny_model: Path, overrides: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        load(tiny_model, override_tensors=overrides)


def test_overrides_as_after_ot() -> None:
    assert _parse_overrides("a=CPU,b=c=SIM0") == [("a", "CPU"), ("b=c", "SIM0")]


def test_a_pattern_that_misses_fused_tensors(sim: ModuleType) -> None:
    fused = cached_model(arch="gemma4", layout="fused", quant="Q6_K")
    with pytest.warns(UserWarning, match=r"only blk\.\d+\.ffn_down_exps\.weight .* not blk\.\d+\.ffn_gate_up_exps\.weight"):
        load(fused, override_tensors={EXPERTS: "CPU"}).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(fused, override_tensors={"_exps": "CPU"}).close()


def test_a_pattern_that_matches_nothing(sim: ModuleType, tiny_model: Path) -> None:
    with pytest.warns(UserWarning, match="'ffn_side_exps' matches no tensor") as caught:
        load(tiny_model, override_tensors={"ffn_side_exps": "CPU"}).close()
    assert caught[0].filename == __file__


def test_progress(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[float] = []

    def progress(fraction: float) -> None:
        seen.append(fraction)
        print("loading")

    load(tiny_model, progress_callback=progress).close()
    assert len(seen) > 5 and seen == sorted(seen) and seen[0] >= 0 and seen[-1] == 1
    assert capfd.readouterr().out.count("loading") == len(seen), "what it prints is seen with verbose=False"


def test_cancelling(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    with pytest.raises(LoadCancelledError, match=re.escape(str(tiny_model))):
        load(tiny_model, expert_cache=cache, progress_callback=lambda fraction: fraction < 0.5)
    assert sim.counters(0).allocated_bytes == sim.counters(1).allocated_bytes == 0
    load(tiny_model, expert_cache=cache).close()


def test_an_error_in_the_callback(sim: ModuleType, tiny_model: Path) -> None:
    def progress(fraction: float) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        load(tiny_model, progress_callback=progress)
    assert sim.counters(0).allocated_bytes == 0


@pytest.mark.parametrize("from_inside", [True, False])
def test_ctrl_c_while_loading(from_inside: bool) -> None:
    """Also when the signal comes while llama.cpp is at work: Python sees it at the entry of the next callback."""
    model = cached_model(arch="olmoe", quant="Q8_0", n_expert=40, n_expert_used=4)
    code = f"""if True:
        import os, signal, threading, hotmoe
        start = threading.Event()

        def shoot():
            start.wait()
            os.kill(os.getpid(), signal.SIGINT)

        n = 0
        def progress(fraction):
            global n
            n += 1
            if fraction > 0.1 and {from_inside}:
                os.kill(os.getpid(), signal.SIGINT)
            if not {from_inside}:
                start.set()

        threading.Thread(target=shoot, daemon=True).start()
        try:
            hotmoe.Llama({str(model)!r}, n_ctx=64, use_mmap=False, verbose=False, progress_callback=progress)
        except KeyboardInterrupt:
            print("interrupted", 0 < n < 40, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "interrupted True True", result.stderr
    assert "ignored" not in result.stderr
