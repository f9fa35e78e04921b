"""Run by the Python of an environment that hotmoe was installed into; prints one JSON object. Standard library only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

IMPORT = """
import sys, time
start = time.perf_counter()
import hotmoe
seconds = time.perf_counter() - start
heavy = sorted({"numpy", "jinja2", "diskcache", "click", "rich", "cffi", "ctypes", "hotmoe._native"} & sys.modules.keys())
import json
print(json.dumps({"seconds": seconds, "heavy": heavy}))
"""

WRONG_VERSION = """
import hotmoe._vendor.llama_cpp
hotmoe._vendor.llama_cpp.__version__ = "0.0.0"
import hotmoe.llama
"""

COMPAT = """
import ctypes, importlib, json, pathlib, sys
lib = pathlib.Path(sys.argv[1]) / "lib"
first = ctypes.CDLL(str(lib / "compat" / "libllama.so"))  # before anything of ours is loaded
others = [ctypes.CDLL(str(lib / "compat" / f"lib{name}.so")) for name in ("ggml", "ggml-base", "mtmd")]
address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
names = [(first, "llama_backend_init"), (first, "ggml_backend_load_all"), (others[0], "ggml_backend_dev_count"),
         (others[1], "ggml_init"), (others[2], "mtmd_default_marker")]
found = all(address(getattr(library, name)) for library, name in names)
import hotmoe
from hotmoe import Llama, _libs
same = address(first.llama_decode) == address(_libs.load("llama").llama_decode)
same = same and address(others[1].ggml_init) == address(_libs.load("ggml-base").ggml_init)
first.llama_backend_init()
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if len(line.split(maxsplit=5)) == 6}
ggml = sorted(path for path in mapped if "ggml" in pathlib.Path(path).name and "/compat/" not in path)
mtmd = importlib.import_module("hotmoe._vendor.llama_cpp.mtmd_cpp")
print(json.dumps({"found": bool(found), "same": same, "ggml": ggml, "marker": mtmd.mtmd_default_marker().decode()}))
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", "-c", code, *args], capture_output=True, text=True, check=False)


def output(result: subprocess.CompletedProcess[str]) -> Any:
    if result.returncode != 0:
        sys.exit(f"{result.args}\n{result.stdout}\n{result.stderr}")
    return json.loads(result.stdout)


def command(*args: str) -> Any:
    script = Path(sys.executable).parent / "hotmoe"
    return output(subprocess.run([str(script), *args], capture_output=True, text=True, check=False))


def main() -> None:
    imports = [output(python(IMPORT)) for _ in range(5)]
    import importlib.metadata

    import hotmoe
    from hotmoe._vendor import llama_cpp

    package = Path(hotmoe.__file__).parent
    compat = output(python(COMPAT, str(package)))
    out = {
        "package": str(package),
        "version": hotmoe.__version__,
        "metadata_version": importlib.metadata.version("hotmoe"),
        "vendored_version": llama_cpp.__version__,
        "import_seconds": sorted(run["seconds"] for run in imports)[2],
        "heavy_modules": imports[0]["heavy"],
        "wrong_version": python(WRONG_VERSION).stderr,
        "info": command("info", "--json"),
        "demo": command("demo", "--json", "-n", "16"),
        "compat_found": compat["found"],
        "compat_same": compat["same"],
        "ggml_libraries": compat["ggml"],
        "mtmd_marker": compat["marker"],
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
