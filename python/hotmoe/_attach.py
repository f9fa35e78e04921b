"""Give an expert cache to a model that is loaded already, by `hotmoe.Llama` or by an installed llama-cpp-python.

An unmodified llama-cpp-python of the release that hotmoe was built from can run on hotmoe's libraries. Where they are has to
be known before it is imported:

    export LLAMA_CPP_LIB_PATH=$(python -c "import hotmoe; print(hotmoe.lib_path())")

Then, in a program that is started with it:

    with hotmoe.expert_placement():          # experts in host memory, in the file's own layout
        llm = llama_cpp.Llama("model.gguf", n_gpu_layers=-1)
    cache = hotmoe.attach(llm, hotmoe.ExpertCache(slots="6GiB"))
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Any

from . import _libs
from ._binding import lib, text
from .cache import ExpertCache
from .errors import LibraryError, StateError

# a function of llama.h that every release has; where it lies tells which library a Python layer has loaded
_LANDMARK = "llama_init_from_model"


def lib_path() -> str:
    """Return the folder for LLAMA_CPP_LIB_PATH: hotmoe's libraries under the names that llama-cpp-python looks for.

    Raises:
        LibraryError: If this build of hotmoe has none.
    """
    folder = _libs.LIB_DIR / "compat"
    if not folder.is_dir():
        raise LibraryError(f"{folder} does not exist: this build of hotmoe cannot serve llama-cpp-python. Reinstall the package")
    return str(folder)


def attach(llm: Any, cache: ExpertCache) -> ExpertCache:
    """Attach an expert cache to a loaded model.

    The cache is closed with the model, or before by `cache.close()`.

    Args:
        llm: A `hotmoe.Llama`, a `llama_cpp.Llama` that runs on hotmoe's libraries, or the `LlamaContext` of either's
            `_internals`.
        cache: A fresh `ExpertCache`.

    Returns:
        The cache.

    Raises:
        LibraryError: If the model was loaded by other libraries than hotmoe's, or by another release of llama-cpp-python;
            the message says what to set.
        PlanError: If there is nothing to pool: the experts lie in device memory, or were repacked for the CPU. The message
            says which, and how to load them instead.
        StateError: If the model has a cache already, or is closed, or the cache was used before.
        TypeError: If `llm` is none of these.
    """
    if not isinstance(cache, ExpertCache):
        raise TypeError(f"cache must be an ExpertCache, not {type(cache).__name__}")
    context = getattr(llm, "_ctx", llm)
    handle = getattr(context, "ctx", None)
    package = _package_of(context)
    if package is None:
        raise TypeError(f"cannot attach to a {type(llm).__name__}: expected a Llama or a LlamaContext of llama-cpp-python")
    _require_ours(package)
    if handle is None:
        raise StateError("the model is closed")
    holder = getattr(llm, "expert_cache", None)
    if holder is not None and holder.attached:
        raise StateError("the model has an expert cache already: close it first")

    cache._attach(ctypes.cast(handle, ctypes.c_void_p).value or 0)
    # the stack of a Llama holds its context, and is unwound last in first out: the cache goes first
    stack: contextlib.ExitStack = context._exit_stack if context is llm else llm._stack
    stack.callback(cache.close)
    with contextlib.suppress(AttributeError):  # a class with slots
        llm.expert_cache = cache
    if not hasattr(llm, "_raise_pending") and callable(getattr(llm, "eval", None)):
        _raise_after_eval(llm, cache)
    return cache


def _raise_after_eval(llm: Any, cache: ExpertCache) -> None:
    """Let `eval` of an upstream Llama raise what a policy in Python raised meanwhile."""
    evaluate = llm.eval

    @functools.wraps(evaluate)
    def eval_and_raise(*args: Any, **kwargs: Any) -> None:
        cache._require_outside()
        evaluate(*args, **kwargs)
        cache._raise_pending()

    llm.eval = eval_and_raise


def _package_of(context: Any) -> str | None:
    """Return the name of the llama-cpp-python package that a LlamaContext belongs to."""
    for base in type(context).__mro__:
        package, _, module = base.__module__.rpartition(".")
        if base.__name__ == "LlamaContext" and module == "_internals":
            return package
    return None


def _require_ours(package: str) -> None:
    """Verify that a llama-cpp-python runs on our libraries and has their release.

    Raises:
        LibraryError: If not.
    """
    bindings = sys.modules[f"{package}.llama_cpp"]
    if _address(bindings._lib) != _address(_libs.load("llama")):
        raise LibraryError(
            f"this model was loaded by {bindings._lib._name}, not by hotmoe's libraries. Before {package} is imported, set "
            f"LLAMA_CPP_LIB_PATH={_libs.LIB_DIR / 'compat'}"
        )
    ours, theirs = text(lib.hotmoe_llama_cpp_python_version()), sys.modules[package].__version__
    if theirs != ours:
        raise LibraryError(
            f"hotmoe's libraries are those of llama-cpp-python {ours}, the installed one is {theirs}, whose structs may differ. "
            f"Install llama-cpp-python=={ours}"
        )


def _address(library: Any) -> int:
    return ctypes.cast(library[_LANDMARK], ctypes.c_void_p).value or 0
