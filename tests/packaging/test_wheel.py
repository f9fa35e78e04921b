"""What the wheel holds."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections import defaultdict
from pathlib import Path

LIBRARIES = ("", "-llama", "-ggml", "-ggml-base", "-ggml-cpu", "-ggml-rpc", "-mtmd", "-sim")
COMPAT = ("llama", "ggml", "ggml-base", "mtmd")
HEADERS = Path(__file__).parents[2] / "native" / "include" / "hotmoe"

# what every Linux with a C++ program on it has
SYSTEM = r"lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s|gomp)\.so\.\d|ld-linux-.*"


def dynamic(path: Path) -> dict[str, list[str]]:
    """Return the dynamic section of a library: tag -> values."""
    found = defaultdict(list)
    text = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    for tag, value in re.findall(r"\((NEEDED|SONAME|RUNPATH|RPATH|DEBUG)\).*\[(.*)\]", text):
        found[tag].append(value)
    return found


def test_tag(wheel: Path) -> None:
    assert re.fullmatch(r"hotmoe-[\w.]+-cp310-abi3-\w+\.whl", wheel.name)


def test_contents(unpacked_wheel: Path) -> None:
    files = [path for path in unpacked_wheel.rglob("*") if path.is_file()]
    names = {path.relative_to(unpacked_wheel).as_posix() for path in files}
    [info] = {name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA")}
    assert {name.partition("/")[0] for name in names} == {"hotmoe", info}
    for name in (
        "py.typed", "_native.abi3.so", "_native.pyi", "_sim_ffi.py", "_vendor/llama_cpp/llama.py", "_vendor/llama_cpp/LICENSE.md",
        "model/LICENSE.md", "cli/commands.py",
    ):  # fmt: skip
        assert f"hotmoe/{name}" in names, name
    assert len([name for name in names if name.endswith(".gguf")]) == 1
    libraries = {name for name in names if name.startswith("hotmoe/lib/")}
    assert libraries == {
        *(f"hotmoe/lib/libhotmoe{name}.so" for name in LIBRARIES),
        *(f"hotmoe/lib/compat/lib{name}.so" for name in COMPAT),
    }
    for_c_policies = {f"hotmoe/include/hotmoe/{header.name}" for header in HEADERS.glob("*.h")} | {"hotmoe/guide/lru.c"}
    assert for_c_policies <= names
    assert "hotmoe/guide/write-a-policy.md" in names
    for name in names - for_c_policies:  # nothing of llama.cpp's, and nothing that is of use in a checkout only
        assert not re.search(r"(^|/)(tests?|bench|include|cmake|pkgconfig|__pycache__)/|\.(h|hpp|cpp|c|a|cmake|pc|pyc)$", name), (
            name
        )


def test_no_file_is_there_twice(unpacked_wheel: Path) -> None:
    by_content = defaultdict(list)
    for path in unpacked_wheel.rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:  # licences may repeat
            by_content[hashlib.sha256(path.read_bytes()).digest()].append(path.name)
    assert [names for names in by_content.values() if len(names) > 1] == []


def test_licences(unpacked_wheel: Path) -> None:
    [folder] = unpacked_wheel.glob("*.dist-info/licenses")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names >= {
        "LICENSE", "python/hotmoe/model/LICENSE.md", "third-party/llama.cpp/LICENSE", "third-party/llama-cpp-python/LICENSE.md",
        "third-party/llama.cpp/vendor/hash/xxhash/LICENSE",
    }  # fmt: skip
    assert "ggml" in (folder / "third-party" / "llama.cpp" / "LICENSE").read_text()
    metadata = (folder.parent / "METADATA").read_text()
    assert "License-Expression: MIT" in metadata and "License-File: LICENSE" in metadata


def test_libraries(unpacked_wheel: Path) -> None:
    folder = unpacked_wheel / "hotmoe" / "lib"
    own = {path.name for path in folder.glob("*.so")}
    for path in folder.glob("*.so"):
        tags = dynamic(path)
        assert tags["SONAME"] == [path.name], "a name that no other package has"
        assert tags["RUNPATH"] == ["$ORIGIN"] and not tags["RPATH"], path.name
        for needed in tags["NEEDED"]:
            assert needed in own or re.fullmatch(SYSTEM, needed), f"{path.name} needs {needed}"
    tags = dynamic(unpacked_wheel / "hotmoe" / "_native.abi3.so")
    assert tags["RUNPATH"] == ["$ORIGIN/lib"]
    assert "libhotmoe.so" in tags["NEEDED"]


def test_plain_names_are_no_copies(unpacked_wheel: Path) -> None:
    folder = unpacked_wheel / "hotmoe" / "lib" / "compat"
    for path in folder.glob("*.so"):
        tags = dynamic(path)
        name = path.name.removeprefix("lib").removesuffix(".so")
        assert tags["SONAME"] == [f"libhotmoe-compat-{name}.so"]
        assert tags["RUNPATH"] == ["$ORIGIN/.."]
        assert f"libhotmoe-{name}.so" in tags["NEEDED"]
        assert path.stat().st_size < 32 * 1024


def test_no_machine_paths(unpacked_wheel: Path) -> None:
    """Neither the folder of the build nor that of the source is in what is shipped as text."""
    for path in unpacked_wheel.rglob("*"):
        if path.suffix in (".py", ".pyi", ".md", ".csv", ".txt") or path.name in ("METADATA", "RECORD"):
            assert "/build/packaging" not in path.read_text(encoding="utf-8"), path
