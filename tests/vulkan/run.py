"""Build hotmoe with the Vulkan backend and run the gates on Mesa's software device.

Usage: python -m tests.vulkan.run [--build FOLDER] [-k EXPRESSION]

Needs the installed package (make build): its Python files are used, with the libraries of the Vulkan build.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.upstream.build import BuildError, run, tool

from .prepare import NotPossibleError, Vulkan, prepare

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def build(folder: Path, vulkan: Vulkan) -> Path:
    """Build the libraries with the Vulkan backend; return their folder."""
    tree = folder / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    defines = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "CMAKE_PREFIX_PATH": vulkan.prefix,
        "GGML_NATIVE": "ON",
        "GGML_VULKAN": "ON",
        "HOTMOE_MTMD": "OFF",
        "Python_EXECUTABLE": sys.executable,
        "Vulkan_INCLUDE_DIR": vulkan.prefix / "include",
        "Vulkan_LIBRARY": vulkan.library,
        "Vulkan_GLSLC_EXECUTABLE": vulkan.glslc,
    }
    options = [f"-D{name}={value}" for name, value in defines.items()]
    run([tool("cmake"), "-G", "Ninja", "-S", ROOT, "-B", tree, *options], f"configuring {tree}", folder / "configure.log")
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
    run([tool("cmake"), "--build", tree, "-j", jobs, "--target", "hotmoe"], f"building {tree}", folder / "build.log")
    return tree / "bin"


def package(folder: Path, libraries: Path) -> Path:
    """Copy the installed package and give the copy the libraries of the Vulkan build; return the folder to import from."""
    spec = importlib.util.find_spec("hotmoe")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("hotmoe is not installed: run make build")
    target = folder / "package" / "hotmoe"
    shutil.rmtree(target, ignore_errors=True)
    ignore = shutil.ignore_patterns("lib", "__pycache__", "*.gguf")
    shutil.copytree(spec.submodule_search_locations[0], target, ignore=ignore)
    (target / "lib").mkdir()
    for library in sorted(libraries.glob("libhotmoe*.so")):
        (target / "lib" / library.name).symlink_to(library)
    return target.parent


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the gates on Vulkan with Mesa's software device.")
    parser.add_argument("--build", type=Path, default=ROOT / "build-vulkan", help="folder for everything that is built")
    parser.add_argument("-k", default="", help="run only the tests that pytest's -k selects")
    args = parser.parse_args()
    folder = args.build.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    try:
        vulkan = prepare(folder)
    except NotPossibleError as reason:
        print(f"vulkan: SKIPPED: {reason}")
        return 0
    try:
        prepared = time.monotonic()
        libraries = build(folder, vulkan)
        copy = package(folder, libraries)
    except BuildError as error:
        print(f"tests/vulkan: {error}", file=sys.stderr)
        return 1
    built = time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "GGML_VK_VISIBLE_DEVICES": "0",  # a software device is passed over unless it is asked for
        "VK_ICD_FILENAMES": str(vulkan.icd),
        "MESA_SHADER_CACHE_DIR": str(folder / "shaders"),  # compiling them is most of the time
        "HOTMOE_TEST_PACKAGE": str(copy / "hotmoe"),
    }
    command = [sys.executable, "-m", "pytest", "-q", HERE / "gates.py", *(["-k", args.k] if args.k else [])]
    status = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
    times = {"prepare": prepared - start, "build": built - prepared, "gates": time.monotonic() - built}
    print("vulkan: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items()))
    return status


if __name__ == "__main__":
    sys.exit(main())
