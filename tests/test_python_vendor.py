"""The vendored Python layer, the libraries it loads, and other packages in the same process (CASE 33)."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hotmoe
import hotmoe._vendor.llama_cpp as vendored
from hotmoe import _libs
from hotmoe.errors import LibraryError
from tests.harness import run_script

REPO = Path(__file__).parent.parent
VENDORED = Path(vendored.__file__).parent

LOADED = """
def loaded(word="ggml"):
    with open("/proc/self/maps") as file:
        return sorted({line.split()[-1] for line in file if word in line or "llama" in line if ".so" in line})
"""


def script_module(path: str) -> ModuleType:
    """Import one of the build's scripts."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPO / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_importing_is_light() -> None:
    printed = run_script("""
        import sys, time
        start = time.perf_counter()
        import hotmoe
        seconds = time.perf_counter() - start
        assert not {"numpy", "hotmoe._native", "hotmoe.llama", "click", "rich"} & sys.modules.keys()
        print(seconds)
    """)
    assert float(printed) < 0.3


def test_versions_agree() -> None:
    assert hotmoe.__version__ == importlib.metadata.version("hotmoe")
    lock = (REPO / "vendor" / "lock.json").read_text(encoding="utf-8")
    assert f'"{vendored.__version__}"' in lock


def test_public_names() -> None:
    for name in hotmoe.__all__:
        assert getattr(hotmoe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hotmoe.nothing


def test_the_vendored_layer_stands_alone() -> None:
    files = sorted(VENDORED.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "llama_cpp"], file
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] != "llama_cpp", file
            elif isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv"), file
    assert "MIT License" in (VENDORED / "LICENSE.md").read_text(encoding="utf-8")


def test_our_own_code_reads_no_environment() -> None:
    package = Path(hotmoe.__file__).parent
    for file in package.glob("*.py"):
        assert "environ" not in file.read_text(encoding="utf-8").replace("environment variable", ""), file


def test_rewrites_fail_loudly() -> None:
    script = script_module("vendor/vendor_python.py")
    for name in script.REWRITES:
        with pytest.raises(script.VendorError, match="has changed"):
            script.rewrite(name, "x = 1\n")
    for text in (
        "import llama_cpp",
        "def f():\n    from llama_cpp.llama import Llama",
        "import os\nos.environ['X']",
        "llama_cpp.x",
    ):
        with pytest.raises(script.VendorError, match="left over"):
            script.check("x.py", text)
    script.check("x.py", "from . import llama_cpp\nllama_cpp.x")


def test_a_second_copy_changes_nothing(tmp_path: Path) -> None:
    script = [sys.executable, str(REPO / "vendor" / "vendor_python.py"), str(tmp_path / "_vendor")]
    assert "(0 files" not in subprocess.run(script, capture_output=True, text=True, check=True).stdout
    extra = tmp_path / "_vendor" / "llama_cpp" / "stale.py"
    extra.touch()
    subprocess.run(script, check=True, capture_output=True)
    assert not extra.exists()
    assert "(0 files" in subprocess.run(script, capture_output=True, text=True, check=True).stdout
    for file in VENDORED.glob("*.py"):
        assert (tmp_path / "_vendor" / "llama_cpp" / file.name).read_bytes() == file.read_bytes(), (
            "what is installed is up to date"
        )
    wrong = [*script[:2], str(tmp_path)]
    assert subprocess.run(wrong, capture_output=True, check=False).returncode == 1, "it removes files, so it is picky"


def test_the_cdef_script_refuses_what_it_cannot_translate(tmp_path: Path) -> None:
    script = script_module("native/cffi/make_cdef.py")
    frame = "#ifdef __cplusplus\nextern {\n#endif\nHOTMOE_API int f(void); // text\n%s\n#ifdef __cplusplus\n}\n#endif\n"
    header = tmp_path / "x.h"
    header.write_text(frame % "", encoding="utf-8")
    assert script.cdef_of(header) == "int f(void);\n"
    for line in ("#pragma pack(1)", "#define F(x) \\\n  x"):
        header.write_text(frame % line, encoding="utf-8")
        with pytest.raises(ValueError, match="cannot turn"):
            script.cdef_of(header)


def test_libraries_come_from_the_package() -> None:
    printed = run_script(
        LOADED
        + """
import hotmoe, os
hotmoe.sim.load()
hotmoe.Llama
lib = os.path.realpath(os.path.join(os.path.dirname(hotmoe.__file__), "lib"))
names = loaded()
assert len(names) >= 5, names
assert all(os.path.dirname(name) == lib and os.path.basename(name).startswith("libhotmoe") for name in names), names
print(*map(os.path.basename, names))
"""
    )
    for name in ("llama", "ggml", "ggml-base", "ggml-cpu"):
        assert _libs.path(name).name in printed.split()


def test_the_environment_cannot_replace_them(tmp_path: Path) -> None:
    for name in ("llama", "ggml", "ggml-base", "ggml-cpu", ""):
        (tmp_path / _libs.path(name).name).write_bytes(b"not a library")
        (tmp_path / f"lib{name}.so").write_bytes(b"not a library")
    run_script(
        LOADED
        + f"""
import hotmoe
hotmoe.Llama
assert not [name for name in loaded("hotmoe") if name.startswith({str(tmp_path)!r})]
""",
        **{name: str(tmp_path) for name in ("LD_LIBRARY_PATH", "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAVA_CPP_LIB")},
    )


def test_a_missing_library_is_named() -> None:
    with pytest.raises(LibraryError, match="no 'nothing'"):
        _libs.load("nothing")


FAKE_PACKAGE = """
import ctypes, pathlib
lib = ctypes.CDLL(str(pathlib.Path(__file__).parent / "lib" / "libggml.so"))
class Llama: pass
"""

FAKE_LIBRARY = "unsigned long ggml_backend_dev_count(void) { return 77; }  void llama_backend_init(void) { __builtin_trap(); }"


@pytest.fixture(scope="module")
def other_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a top-level package llama_cpp that brings a ggml of its own."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "llama_cpp" / "lib").mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").write_text(FAKE_PACKAGE, encoding="utf-8")
    source = folder / "fake.c"
    source.write_text(FAKE_LIBRARY, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed to build the package, too"
    target = folder / "llama_cpp" / "lib" / "libggml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libggml.so", "-o", target, source], check=True)
    return folder


@pytest.mark.parametrize("first", ["llama_cpp", "hotmoe"])
def test_beside_an_installed_llama_cpp_python(other_package: Path, tiny_model: Path, first: str) -> None:
    use_other = "import llama_cpp; assert llama_cpp.lib.ggml_backend_dev_count() == 77"
    use_ours = f"""
import hotmoe
hotmoe.sim.load(mib=256)
with hotmoe.Llama({str(tiny_model)!r}, expert_cache=hotmoe.ExpertCache(slots=8), n_ctx=64, verbose=False) as llm:
    llm("hello", max_tokens=4)
    assert llm.expert_cache.stats().decode.events > 0
"""
    run_script(
        f"import sys; sys.path.insert(0, {str(other_package)!r})\n"
        + "\n".join([use_other, use_ours] if first == "llama_cpp" else [use_ours, use_other])
        + """
from hotmoe.devices import list_devices
assert {"CPU", "SIM0"} == {device.name for device in list_devices()}
assert llama_cpp.lib.ggml_backend_dev_count() == 77
import hotmoe._vendor.llama_cpp as ours
assert sys.modules["llama_cpp"] is llama_cpp is not ours
assert not issubclass(hotmoe.Llama, llama_cpp.Llama) and issubclass(hotmoe.Llama, ours.Llama)
assert not [name for name in sys.modules if name.startswith("llama_cpp.")]
"""
    )
