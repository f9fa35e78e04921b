"""Build two trees of llama.cpp: as upstream published it, and ours.

Both come from the pinned sdist, and both are built by CMakeLists.txt of this folder with the same options. The patched
tree is ``vendor/upstream``, which the package uses too; the unpatched one lies in the build folder.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ARCHS_PATCH = HERE / "test-llama-archs.patch"
ARCHS_SOURCE = "tests/test-llama-archs.cpp"


class BuildError(Exception):
    """A step of the build failed; the message ends with what it printed."""


@dataclass(frozen=True)
class Trees:
    """Where things are.

    Attributes:
        stock: Programs and libraries of the unpatched tree.
        patched: Those of the patched tree.
        sdist: The pinned sdist of llama-cpp-python.
    """

    stock: Path
    patched: Path
    sdist: Path


def load_fetch() -> ModuleType:
    """Return ``vendor/fetch.py`` as a module."""
    spec = importlib.util.spec_from_file_location("hotmoe_vendor_fetch", ROOT / "vendor" / "fetch.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(command: list[str | Path], what: str, log: Path | None = None) -> None:
    """Run a command; raise with the end of its output if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if log is not None:
        log.write_text(result.stdout)
    if result.returncode != 0:
        tail = "\n".join(result.stdout.splitlines()[-25:])
        raise BuildError(f"{what} failed ({result.returncode}):\n{tail}")


def tool(name: str) -> str:
    """Return a build tool: the one beside this Python, else the one in PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise BuildError(f"{name} is missing: run make test-upstream, or install it with pip")
    return found


def unpack_stock(fetch: ModuleType, sdist: Path, target: Path) -> None:
    """Unpack the sdist without our patches, unless it lies there already."""
    stamp = target / ".stamp"
    wanted = fetch.sha256_of(sdist)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(target, ignore_errors=True)
    fetch.unpack(sdist, target)
    stamp.write_text(wanted)


def patched_archs(target: Path) -> Path:
    """Write upstream's test-llama-archs.cpp with our patch below ``target``; leave it alone if it is right already."""
    import patch_ng  # of the build environment

    fresh = target / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / ARCHS_SOURCE).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "vendor" / "upstream" / "llama.cpp" / ARCHS_SOURCE, fresh / ARCHS_SOURCE)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    patch_set = patch_ng.fromfile(str(ARCHS_PATCH))
    if not patch_set or not patch_set.apply(root=str(fresh)):
        raise BuildError(f"{ARCHS_PATCH.name} no longer fits the pinned source: make it again")
    final = target / ARCHS_SOURCE
    if not final.exists() or final.read_bytes() != (fresh / ARCHS_SOURCE).read_bytes():
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(fresh / ARCHS_SOURCE, final)
    return final


def build(folder: Path, upstream: Path, lock: dict[str, str], targets: list[str], archs: Path | None) -> Path:
    """Configure and build one tree; return the folder of its programs."""
    folder.mkdir(parents=True, exist_ok=True)
    defines = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "GGML_NATIVE": "ON",
        "HOTMOE_UPSTREAM": upstream,
        "HOTMOE_PATCHED": "ON" if archs else "OFF",
        "HOTMOE_ARCHS_SOURCE": archs or "",
        "HOTMOE_PY_VERSION": lock["version"],
        "HOTMOE_LLAMA_COMMIT": lock["llama_cpp_commit"],
    }
    options = [f"-D{name}={value}" for name, value in defines.items()]
    run([tool("cmake"), "-G", "Ninja", "-S", HERE, "-B", folder, *options], f"configuring {folder}", folder / "configure.log")
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
    run([tool("cmake"), "--build", folder, "-j", jobs, "--target", *targets], f"building {folder}", folder / "build.log")
    return folder / "bin"


def build_trees(stock: Path, patched: Path) -> Trees:
    """Fetch, unpack, patch and build whatever is not up to date."""
    fetch = load_fetch()
    lock = json.loads((ROOT / "vendor" / "lock.json").read_text())
    fetch.fetch(None, force=False)
    sdist = fetch.download(lock)

    unpack_stock(fetch, sdist, stock / "source")
    stock_bin = build(stock, stock / "source", lock, ["stock-probe"], None)

    archs = patched_archs(patched / "archs")
    targets = ["stock-probe", "test-backend-ops", "test-llama-archs"]
    patched_bin = build(patched, ROOT / "vendor" / "upstream", lock, targets, archs)
    return Trees(stock_bin, patched_bin, sdist)
