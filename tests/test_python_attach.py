"""`hotmoe.attach`: pools for models that are loaded already, by our class or by an unmodified llama-cpp-python (CASE 33)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hotmoe
from hotmoe import _attach, _libs
from hotmoe._vendor.llama_cpp import _internals, llama_cpp
from hotmoe.errors import ArgumentError, LibraryError, StateError
from tests.harness import run_script
from tests.models import cached_model
from tests.usage import stock


def load(path: Path, **options: Any) -> hotmoe.Llama:
    return hotmoe.Llama(path, **{"n_ctx": 128, "n_threads": 1, "n_gpu_layers": -1, "verbose": False, **options})


def greedy(llm: Any, n: int = 12) -> str:
    return str(llm("hello", max_tokens=n, temperature=0)["choices"][0]["text"])


def repacked_model() -> Path:
    """Return a model whose experts the CPU repacks, unless it is told not to."""
    return cached_model(arch="olmoe", quant="Q4_0")


# ---- our own class ----


def test_to_a_loaded_model(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, cpu_moe=True) as llm:
        expected = greedy(llm)
        cache = hotmoe.attach(llm, hotmoe.ExpertCache(slots=8))
        assert llm.expert_cache is cache
        assert greedy(llm) == expected and cache.stats().decode.events > 0
        with pytest.raises(StateError, match="already"):
            hotmoe.attach(llm, hotmoe.ExpertCache(slots=8))
        with cache:
            pass
        assert greedy(llm) == expected, "the model goes on without"
        with hotmoe.attach(llm, hotmoe.ExpertCache(slots=12)) as second:
            assert greedy(llm) == expected and second.plan.slots == (12,)
            assert llm.expert_cache is second
        with pytest.raises(StateError, match="is closed; make a new one"):
            hotmoe.attach(llm, cache)
        third = hotmoe.attach(llm, hotmoe.ExpertCache(slots=4))
    assert not third.attached
    assert sim.counters(0).allocated_bytes == sim.counters(1).allocated_bytes == 0


def test_refusals(sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model) as llm:
        cache = hotmoe.ExpertCache(slots=8)
        with pytest.raises(hotmoe.PlanError, match=r"device memory already \(SIM0\); keep them in host memory with cpu_moe"):
            hotmoe.attach(llm, cache)
        assert not cache.attached and llm.expert_cache is None, "nothing has changed"
    with pytest.raises(StateError, match="closed"):
        hotmoe.attach(llm, cache)
    repacked = pytest.raises(hotmoe.PlanError, match=r"repacked for the CPU.*load the model with hotmoe")
    with load(repacked_model(), devices=[]) as llm, repacked:
        hotmoe.attach(llm, cache)
    with load(tiny_model, cpu_moe=True) as llm:
        with pytest.raises(TypeError, match="ExpertCache, not int"):
            hotmoe.attach(llm, 8)  # type: ignore[arg-type]
        hotmoe.attach(llm, cache)
        assert cache.attached, "a refused cache can be used elsewhere"
    for thing in (None, 3, object(), SimpleNamespace(_ctx=3)):
        with pytest.raises(TypeError, match="cannot attach to a"):
            hotmoe.attach(thing, hotmoe.ExpertCache())


def test_to_a_context_of_the_internals(sim: ModuleType, tiny_model: Path) -> None:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 99
    with hotmoe.expert_placement():
        model = _internals.LlamaModel(path_model=str(tiny_model), params=params, verbose=False)
    contexts = []
    for _ in range(2):
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = 64, 1, 1
        contexts.append(_internals.LlamaContext(model=model, params=options, verbose=False))
    caches = [hotmoe.attach(context, hotmoe.ExpertCache(slots=slots)) for context, slots in zip(contexts, (8, 12), strict=True)]
    batch = _internals.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1, verbose=False)
    for i, context in enumerate([*contexts, contexts[0]]):
        batch.set_batch([300 + i], i // 2, False)
        context.decode(batch)
    assert [cache.stats().total.steps.steps for cache in caches] == [2, 1]
    contexts[0].close()
    assert [cache.attached for cache in caches] == [False, True]
    model.close()
    assert not caches[1].attached
    assert sim.counters(0).allocated_bytes == sim.counters(1).allocated_bytes == 0


# ---- placement for whoever loads ----


def test_expert_placement_is_for_its_block(sim: ModuleType, tiny_model: Path) -> None:
    def expert_bytes(**options: Any) -> int:
        with load(tiny_model, op_offload=False, n_batch=4, **options):
            return sim.counters(0).allocated_bytes + sim.counters(1).allocated_bytes

    resident, hosted = expert_bytes(), expert_bytes(cpu_moe=True)
    with hotmoe.expert_placement():
        assert expert_bytes() == hosted
    with hotmoe.expert_placement(n_cpu_moe=1):
        assert hosted < expert_bytes() < resident
    with hotmoe.expert_placement(cpu_moe=False):
        assert expert_bytes() == resident
    assert expert_bytes() == resident
    with hotmoe.expert_placement(n_cpu_moe=2):
        assert expert_bytes(n_cpu_moe=1) > hosted, "the inner one"
        assert expert_bytes() == hosted, "the outer one again"
    for options in ({"n_cpu_moe": -1}, {"cpu_moe": True, "n_cpu_moe": 1}):
        with pytest.raises(ArgumentError, match="n_cpu_moe"), hotmoe.expert_placement(**options):  # type: ignore[arg-type]
            pass
    assert expert_bytes() == resident


# ---- an installed llama-cpp-python ----


@pytest.fixture(scope="module")
def upstream() -> Path:
    """The folder that an unmodified llama-cpp-python is installed in."""
    return stock.install()


USE_STOCK = """
    import llama_cpp
    with hotmoe.expert_placement():
        stock = llama_cpp.Llama({model!r}, n_ctx=128, n_threads=1, n_gpu_layers=-1, verbose=False)
    plain = stock("hello", max_tokens=12, temperature=0)["choices"][0]["text"]
    cache = hotmoe.attach(stock, hotmoe.ExpertCache(slots=8, policy="slru"))
    assert stock("hello", max_tokens=12, temperature=0)["choices"][0]["text"] == plain
    assert cache.stats().decode.events > 0 and cache.plan.policy == "slru"
"""
USE_OURS = """
    ours = hotmoe.Llama({model!r}, n_ctx=128, n_threads=1, expert_cache=hotmoe.ExpertCache(slots=8), verbose=False)
    text = ours("hello", max_tokens=12, temperature=0)["choices"][0]["text"]
    assert ours.expert_cache.stats().decode.events > 0
"""
CHECKS = """
    assert text == plain
    assert not issubclass(hotmoe.Llama, llama_cpp.Llama) and not isinstance(stock, hotmoe.Llama)
    with open("/proc/self/maps") as file:
        names = {line.split()[-1].rpartition("/")[2] for line in file if ".so" in line}
    assert sorted(n for n in names if "ggml-base" in n) == ["libhotmoe-ggml-base.so"], "one ggml"
    assert hotmoe.sim.counters().allocated_bytes > 0
    stock.close()
    assert not cache.attached
    again = ours("hello", max_tokens=12, temperature=0)["choices"][0]["text"]
    assert again == text
    ours.close()
    assert hotmoe.sim.counters().allocated_bytes == 0
    print("done")
"""


@pytest.mark.parametrize("first", ["llama_cpp", "hotmoe"])
def test_both_packages_in_one_process(upstream: Path, tiny_model: Path, first: str) -> None:
    imports = ["import llama_cpp", "import hotmoe; hotmoe.Llama"]
    uses = [USE_STOCK.format(model=str(tiny_model)), USE_OURS.format(model=str(tiny_model))]
    if first == "hotmoe":
        imports, uses = imports[::-1], uses[::-1]
    code = "\n    ".join(["", *imports, "hotmoe.sim.load(mib=256)"]) + "".join(uses) + CHECKS
    assert run_script(code, **stock.environment(upstream)).strip() == "done"


def test_deleting_the_model_detaches(upstream: Path, tiny_model: Path) -> None:
    code = f"""
    import gc, hotmoe, llama_cpp
    hotmoe.sim.load(mib=256)
    with hotmoe.expert_placement():
        llm = llama_cpp.Llama({str(tiny_model)!r}, n_ctx=128, n_threads=1, n_gpu_layers=-1, verbose=False)
    cache = hotmoe.attach(llm, hotmoe.ExpertCache(slots=8))
    llm("hello", max_tokens=2)
    del llm
    gc.collect()
    print(cache.attached, hotmoe.sim.counters().allocated_bytes)
    """
    assert run_script(code, **stock.environment(upstream)).split() == ["False", "0"]


def test_repacked_and_resident_experts_of_llama_cpp_python(upstream: Path) -> None:
    code = f"""
    import hotmoe, llama_cpp
    for layers in (0, -1):
        if layers:  # only now, since beside a device llama.cpp does not repack
            hotmoe.sim.load(mib=256)
        llm = llama_cpp.Llama({str(repacked_model())!r}, n_ctx=128, n_gpu_layers=layers, verbose=False)
        try:
            hotmoe.attach(llm, hotmoe.ExpertCache(slots=8))
        except hotmoe.PlanError as error:
            print(error)
        llm.close()
    """
    repacked, resident = run_script(code, **stock.environment(upstream)).splitlines()
    assert "repacked for the CPU" in repacked and "device memory already" in resident


@pytest.mark.parametrize("first", ["llama_cpp", "hotmoe"])
def test_other_libraries_are_refused(upstream: Path, tiny_model: Path, tmp_path: Path, first: str) -> None:
    """llama-cpp-python with libraries of its own, which are in the process beside ours."""
    for library in [_libs.path("llama"), *_libs.LIB_DIR.glob("libhotmoe-ggml*.so")]:
        shutil.copy(library, tmp_path / library.name.replace("hotmoe-", ""))
    # under names of their own, or the loader would take ours for them
    for file in list(tmp_path.iterdir()):
        data = file.read_bytes()
        file.write_bytes(data.replace(b"libhotmoe-", b"libgotmoe-"))
        (tmp_path / f"libgotmoe-{file.name[3:]}").symlink_to(file.name)
    imports = ["import llama_cpp", "import hotmoe; hotmoe.Llama"]
    code = f"""
    {(chr(10) + "    ").join(imports if first == "llama_cpp" else imports[::-1])}
    llm = llama_cpp.Llama({str(tiny_model)!r}, n_ctx=128, n_threads=1, verbose=False)
    try:
        hotmoe.attach(llm, hotmoe.ExpertCache(slots=8))
    except hotmoe.errors.LibraryError as error:
        print(error)
    assert llm("hello", max_tokens=2)["choices"]
    ours = hotmoe.Llama({str(tiny_model)!r}, n_ctx=128, n_threads=1, verbose=False)
    assert ours("hello", max_tokens=2)["choices"]
    """
    environment = stock.environment(upstream) | {"LLAMA_CPP_LIB_PATH": str(tmp_path)}
    message = run_script(code, **environment)
    assert f"loaded by {tmp_path}/libllama.so" in message
    assert f"set LLAMA_CPP_LIB_PATH={hotmoe.lib_path()}" in message


def test_another_release_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hotmoe._vendor.llama_cpp as package

    with load(tiny_model, cpu_moe=True) as llm:
        monkeypatch.setattr(package, "__version__", "0.3.35")
        with pytest.raises(LibraryError, match=r"installed one is 0\.3\.35.*Install llama-cpp-python==0\.3\.36"):
            hotmoe.attach(llm, hotmoe.ExpertCache(slots=8))


def test_a_build_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(Path(hotmoe.lib_path()).iterdir())
    monkeypatch.setattr(_attach._libs, "LIB_DIR", tmp_path)
    with pytest.raises(LibraryError, match="compat does not exist"):
        hotmoe.lib_path()


def test_the_namespace() -> None:
    run_script("""
    import hotmoe.llama_cpp as llama_cpp
    from hotmoe.llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    from hotmoe.llama_cpp import Llama, LlamaGrammar, llama_chat_format
    import hotmoe, hotmoe._vendor.llama_cpp as vendored, hotmoe._vendor.llama_cpp.llama_chat_format as formats
    assert Llama is hotmoe.Llama is llama_cpp.Llama and llama_chat_format is formats
    assert LlamaGrammar is vendored.LlamaGrammar and LlamaPromptLookupDecoding
    assert llama_cpp.__version__ == vendored.__version__ and llama_cpp.llama_backend_init
    """)


def test_shims_are_no_copies() -> None:
    for file in Path(hotmoe.lib_path()).iterdir():
        dump = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
        assert f"libhotmoe-{file.name[3:]}" in dump and file.stat().st_size < 100_000
