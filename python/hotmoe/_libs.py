"""Find and load the native libraries of this package, and nothing else's.

They lie in `hotmoe/lib` under names of our own (`libhotmoe-llama.so`, ...). Each is loaded by absolute path and in order
of dependence: the loader then resolves their references to each other by the libraries that are in the process already,
whatever LD_LIBRARY_PATH says, and whatever ggml an installed llama-cpp-python has brought along. No environment variable
is read here.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import LibraryError

LIB_DIR = Path(__file__).parent.absolute() / "lib"

if sys.platform == "win32":
    _PREFIX, _SUFFIX = "", ".dll"
elif sys.platform == "darwin":
    _PREFIX, _SUFFIX = "lib", ".dylib"
else:
    _PREFIX, _SUFFIX = "lib", ".so"


def include_path() -> str:
    """Return the folder for a C compiler's -I: `#include <hotmoe/policy.h>` is what a policy written in C needs."""
    return str(LIB_DIR.parent / "include")


def path(name: str = "") -> Path:
    """Return the absolute path of a library, whether or not it exists.

    Args:
        name: "llama", "ggml", "ggml-base", "mtmd", "sim", ...; "" for libhotmoe itself.
    """
    return LIB_DIR / f"{_PREFIX}hotmoe{'-' if name else ''}{name}{_SUFFIX}"


@functools.cache
def load(name: str = "") -> ctypes.CDLL:
    """Load a library and what it depends on.

    Args:
        name: As for `path`.

    Raises:
        LibraryError: If it is missing or does not load; the message says which one and what to do.
    """
    for dependency in _dependencies(name):
        load(dependency)
    file = path(name)
    if not file.exists():
        built = ", ".join(sorted(p.name for p in LIB_DIR.glob(f"{_PREFIX}hotmoe*{_SUFFIX}"))) or "no library at all"
        raise LibraryError(
            f"{file} does not exist (found: {built}). This build of hotmoe has no {name or 'hotmoe'!r}: reinstall the package"
        )
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise LibraryError(f"cannot load {file}: {error}. Reinstall the package, or install what the message names") from error


def function(library: str, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a C function with its ctypes signature.

    Args:
        library: As for `load`.
        name: Exported name.
        result: ctypes type of the result, None for void.
        *arguments: ctypes types of the arguments.
    """
    found = load(library)[name]  # a fresh object: other users of the library may declare it differently
    found.restype = result
    found.argtypes = arguments
    return found


def _dependencies(name: str) -> list[str]:
    """Return the libraries to load before `name`, in order."""
    if name == "ggml-base":
        return []
    if name.startswith("ggml-"):
        return ["ggml-base"]
    if name == "ggml":  # its backends: cpu, and what else this build has
        stem = len(f"{_PREFIX}hotmoe-")
        return ["ggml-base", *sorted(p.name[stem : -len(_SUFFIX)] for p in LIB_DIR.glob(f"{_PREFIX}hotmoe-ggml-*{_SUFFIX}"))]
    if name == "llama":
        return ["ggml"]
    return ["llama"]
