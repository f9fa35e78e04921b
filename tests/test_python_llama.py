"""`hotmoe.Llama`: the life of a model, its context and its cache, and the errors on the way."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotmoe
from hotmoe.errors import ArgumentError


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collects exceptions that destructors raised, which Python only prints."""
    caught: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", caught.append)
    yield caught
    gc.collect()
    assert not caught, [repr(c.exc_value) for c in caught]


def load(model: Path, cache: hotmoe.ExpertCache | None = None, **options: Any) -> hotmoe.Llama:
    """Load quietly, with a small context."""
    return hotmoe.Llama(model, **{"expert_cache": cache, "n_ctx": 128, "verbose": False, **options})


def allocated(sim: ModuleType) -> int:
    """Return the bytes in use on all simulated devices."""
    return sum(sim.counters(i).allocated_bytes for i in range(2))


def greedy(llm: hotmoe.Llama, n: int = 16) -> str:
    """Return the most likely continuation of a fixed prompt."""
    text = llm.create_completion("hello", max_tokens=n, temperature=0)["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def test_text_is_the_same_with_and_without_a_pool(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, hotmoe.ExpertCache(slots=0)) as llm:
        off = greedy(llm)
    for slots in (4, 16, 40):
        with load(tiny_model, hotmoe.ExpertCache(slots=slots)) as llm:
            assert greedy(llm) == off
            assert llm.expert_cache is not None and llm.expert_cache.stats().decode.events > 0


def test_defaults_with_a_cache(sim: ModuleType, tiny_model: Path) -> None:
    def device_bytes(cache: hotmoe.ExpertCache | None = None, **options: Any) -> int:
        # without op_offload there is no room for experts that are copied to the device for a prompt; n_batch keeps the rest small
        with load(tiny_model, cache, op_offload=False, n_batch=4, **options):
            return allocated(sim)

    resident = device_bytes(n_gpu_layers=-1)
    hosted = device_bytes(hotmoe.ExpertCache(slots=0))
    assert 0 < hosted < resident - (8 << 20), "all layers on the devices, all experts but not"
    assert device_bytes(n_gpu_layers=-1, cpu_moe=True) == hosted, "cpu_moe works without a cache"
    assert hosted < device_bytes(n_gpu_layers=-1, n_cpu_moe=1) < resident
    assert device_bytes() == 0, "without a cache the defaults are llama-cpp-python's"


def test_experts_of_some_layers(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    with load(tiny_model, cache, n_cpu_moe=1) as llm:
        assert [bank.pooled for bank in cache.plan.banks] == [True, False]
        assert cache.plan.banks[1].reason
        greedy(llm)
    with pytest.raises(hotmoe.PlanError):
        load(tiny_model, hotmoe.ExpertCache(slots=8, strict=True), n_cpu_moe=1)


@pytest.mark.parametrize("options", [{"n_cpu_moe": -1}, {"n_cpu_moe": True}, {"n_cpu_moe": 1, "cpu_moe": True}])
def test_contradictions(tiny_model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="n_cpu_moe"):
        load(tiny_model, **options)


def test_something_else_as_a_cache(tiny_model: Path) -> None:
    with pytest.raises(TypeError, match="ExpertCache, not int"):
        load(tiny_model, 32)  # type: ignore[arg-type]


def test_a_call_that_never_reaches_the_constructor(unraisable: list[Any]) -> None:
    with pytest.raises(TypeError, match="model_path"):
        hotmoe.Llama()  # type: ignore[call-arg]
    gc.collect()


def test_close_is_idempotent(sim: ModuleType, tiny_model: Path, unraisable: list[Any]) -> None:
    llm = load(tiny_model, hotmoe.ExpertCache(slots=8))
    assert allocated(sim) > 0
    llm.close()
    assert allocated(sim) == 0
    llm.close()
    del llm


def test_an_error_in_the_block_closes_too(sim: ModuleType, tiny_model: Path) -> None:
    with pytest.raises(ZeroDivisionError), load(tiny_model, hotmoe.ExpertCache(slots=8)):
        _ = 1 / 0
    assert allocated(sim) == 0


def test_deleting_closes(sim: ModuleType, tiny_model: Path, unraisable: list[Any]) -> None:
    llm = load(tiny_model, hotmoe.ExpertCache(slots=8))
    greedy(llm, 2)
    del llm
    gc.collect()
    assert allocated(sim) == 0


@pytest.mark.parametrize("context_first", [False, True])
def test_cache_and_context_may_go_in_any_order(sim: ModuleType, tiny_model: Path, context_first: bool) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    llm = load(tiny_model, cache)
    greedy(llm, 2)
    for close in [llm._ctx.close, cache.close] if context_first else [cache.close, llm._ctx.close]:
        close()
    llm.close()
    assert allocated(sim) == 0


def test_a_context_lives_on_without_its_cache(sim: ModuleType, tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=8)
    with load(tiny_model, cache) as llm:
        text = greedy(llm)
        cache.close()
        llm.reset()
        assert greedy(llm) == text


def test_two_models_in_a_row_and_side_by_side(sim: ModuleType, tiny_model: Path) -> None:
    texts = []
    for _ in range(2):
        with load(tiny_model, hotmoe.ExpertCache(slots=8)) as llm:
            texts.append(greedy(llm))
    with load(tiny_model, hotmoe.ExpertCache(slots=8)) as a, load(tiny_model, hotmoe.ExpertCache(slots=12)) as b:
        texts += [greedy(a), greedy(b)]
        assert a.expert_cache is not None and b.expert_cache is not None
        assert a.expert_cache.plan.slots == (8,)
        assert b.expert_cache.plan.slots == (12,)
        a.close()
        b.reset()
        texts.append(greedy(b))
    assert len(set(texts)) == 1
    assert allocated(sim) == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"this is no model", "invalid magic"),
        (b"GGUF\x03\x00\x00\x00" + b"\x00" * 16, "error loading model"),
    ],
)
def test_load_errors_say_why(tmp_path: Path, content: bytes | None, reason: str, unraisable: list[Any]) -> None:
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(hotmoe.ModelLoadError) as caught:
        load(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError), "what llama-cpp-python raises"
    assert bool(caught.value.log) == (content is not None)
    del caught
    gc.collect()


def test_a_context_that_does_not_fit(sim: ModuleType, tiny_model: Path, unraisable: list[Any]) -> None:
    with pytest.raises(hotmoe.ModelLoadError, match="out of memory"):
        load(tiny_model, hotmoe.ExpertCache(slots=8), n_ctx=4_000_000)
    assert allocated(sim) == 0


def test_bad_arguments_stay_what_they_are(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="too long") as caught:
        load(tiny_model, kv_overrides={"general.name": "x" * 200})
    assert not isinstance(caught.value, hotmoe.HotmoeError)


def test_the_log_goes_where_it_went(tiny_model: Path) -> None:
    code = f"""if True:
        import sys, hotmoe
        from hotmoe._vendor.llama_cpp import llama_cpp
        for verbose in (True, False):
            hotmoe.Llama({str(tiny_model)!r}, verbose=verbose).close()
            print("====", file=sys.stderr, flush=True)
        lines = []
        callback = llama_cpp.llama_log_callback(lambda level, text, _: lines.append(text))
        llama_cpp.llama_log_set(callback, None)
        hotmoe.Llama({str(tiny_model)!r}, verbose=False).close()
        n = len(lines)
        llama_cpp.llama_model_load_from_file(b"/nonexistent", llama_cpp.llama_model_default_params())
        print(n > 0, len(lines) > n)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    verbose, quiet, own = result.stderr.split("====")
    assert "llama_model_loader" in verbose
    assert "llama_model_loader" not in quiet + own
    assert result.stdout.strip() == "True True", "a callback of the user's own gets everything, and stays"


def test_a_layer_that_is_left_out_is_said(tiny_model: Path) -> None:
    """With verbose=False, too, while the loader's warnings are not."""
    code = f"""if True:
        import hotmoe
        hotmoe.sim.load(mib=256)
        warned = {{"tokenizer.ggml.eos_token_id": 5}}
        cache = hotmoe.ExpertCache(slots=8)
        hotmoe.Llama({str(tiny_model)!r}, expert_cache=cache, n_cpu_moe=1, n_ctx=64, kv_overrides=warned, verbose=False).close()
    """
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.splitlines()
    assert any("layer 1 is left out" in line for line in lines), lines
    assert not any("special_eos_id" in line for line in lines), lines


def test_pickle_makes_a_model_with_a_fresh_cache(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, hotmoe.ExpertCache(slots=8, policy="fifo")) as llm:
        text = greedy(llm)
        with pickle.loads(pickle.dumps(llm)) as copy:
            assert greedy(copy) == text
            assert copy.expert_cache is not llm.expert_cache
            assert copy.expert_cache.plan.slots == (8,)
            assert copy.expert_cache.policy == "fifo"


def test_the_interpreter_may_end_first(tiny_model: Path) -> None:
    code = f"""if True:
        import hotmoe
        hotmoe.sim.load()
        llm = hotmoe.Llama({str(tiny_model)!r}, expert_cache=hotmoe.ExpertCache(slots=8), n_ctx=64, verbose=False)
        cycle = [llm]; cycle.append(cycle)
        print(len(llm("hello", max_tokens=4)["choices"][0]["text"]) > 0)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr
    assert "Exception ignored" not in result.stderr and "Traceback" not in result.stderr
