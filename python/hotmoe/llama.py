"""llama-cpp-python's `Llama` with an expert cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._binding import check, ffi, lib, text
from ._log import capture_log
from ._vendor.llama_cpp import Llama as _BaseLlama
from ._vendor.llama_cpp import __version__ as _base_version
from .cache import ExpertCache
from .errors import ArgumentError, HotmoeError, LibraryError, ModelLoadError

if text(lib.hotmoe_llama_cpp_python_version()) != _base_version:
    raise LibraryError(
        f"the libraries were built for llama-cpp-python {text(lib.hotmoe_llama_cpp_python_version())}, the vendored Python layer "
        f"is {_base_version}. Files of two installations are mixed: uninstall hotmoe and install it again"
    )


class Llama(_BaseLlama):  # type: ignore[misc]  # the vendored layer is not typed strictly
    """A model and its context, as in llama-cpp-python, whose experts can be cached.

    Everything that llama-cpp-python's `Llama` takes and does is taken and done here too. With `expert_cache`, the defaults
    of two arguments change: `n_gpu_layers` becomes -1 (all layers on the device) and `cpu_moe` True (all experts in host
    memory).

    Attributes:
        expert_cache: The cache that was given, live now; None if there is none.

    Examples:
        >>> with Llama("model.gguf", expert_cache=ExpertCache(slots=32)) as llm:  # doctest: +SKIP
        ...     print(llm("The quick brown fox", max_tokens=16)["choices"][0]["text"])
        ...     print(llm.expert_cache.stats().decode.hit_rate)
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache: ExpertCache | None = None,
        cpu_moe: bool | None = None,
        n_cpu_moe: int = 0,
        **kwargs: Any,
    ) -> None:
        """Load a model.

        Args:
            model_path: A GGUF file; of a split model, its first shard.
            expert_cache: A fresh `ExpertCache`, which serves this object alone.
            cpu_moe: Keep the expert weights of all layers in host memory (-cmoe). None: True with an expert cache for
                which `n_cpu_moe` is not given either, else False.
            n_cpu_moe: Keep the expert weights of the first n layers in host memory (-ncmoe).
            **kwargs: The arguments of llama-cpp-python's `Llama`.

        Raises:
            ModelLoadError: If the model or its context cannot be made; it carries llama.cpp's last log lines. It is a
                ValueError too.
            PlanError: If the size of the cache cannot be met, or there is nothing to pool.
            StateError: If `expert_cache` belongs to another object already.
        """
        self.expert_cache = expert_cache
        self._stack = contextlib.ExitStack()  # replaced by the base class, but close() may come before that
        if isinstance(n_cpu_moe, bool) or not isinstance(n_cpu_moe, int) or n_cpu_moe < 0:
            raise ArgumentError(f"n_cpu_moe={n_cpu_moe!r} must be a number of layers, 0 or more; for all layers use cpu_moe=True")
        if cpu_moe and n_cpu_moe:
            raise ArgumentError(f"cpu_moe=True already covers n_cpu_moe={n_cpu_moe}: give one of them")
        if expert_cache is not None:
            if not isinstance(expert_cache, ExpertCache):
                raise TypeError(f"expert_cache must be an ExpertCache, not {type(expert_cache).__name__}")
            expert_cache._require_new()
            kwargs.setdefault("n_gpu_layers", -1)
            cpu_moe = n_cpu_moe == 0 if cpu_moe is None else cpu_moe
        self._placement = {"cpu_moe": bool(cpu_moe), "n_cpu_moe": n_cpu_moe}

        model_path = os.fspath(model_path)
        if not Path(model_path).exists():
            raise ModelLoadError(f"model file does not exist: {model_path}")
        n_host_layers = lib.HOTMOE_ALL_LAYERS if cpu_moe else n_cpu_moe
        try:
            with self._loading(model_path):
                with _expert_placement(n_host_layers) if expert_cache is not None or n_host_layers else contextlib.nullcontext():
                    super().__init__(model_path, **kwargs)
                if expert_cache is not None:
                    self._stack.callback(expert_cache._close)  # runs before the context, which entered the stack earlier, goes
                    expert_cache._attach(ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0)
        except BaseException:
            self.close()  # device memory must not wait for the garbage collector
            raise

    @contextlib.contextmanager
    def _loading(self, model_path: str) -> Iterator[None]:
        """Turn llama-cpp-python's bare "failed to load" into an error that says why."""
        with capture_log() as log:
            try:
                yield
            except ValueError as error:
                from_llama_cpp = log.has_error or str(error).startswith("Failed to ")
                if isinstance(error, HotmoeError) or not from_llama_cpp:  # an argument was wrong, not the model
                    raise
                raise ModelLoadError(f"cannot load {model_path}: {error}", log.lines) from error

    def close(self) -> None:
        """Free the cache's pools, the context and the model. More than once is fine."""
        stack = self.__dict__.get("_stack")
        if stack is not None:
            stack.close()

    def __enter__(self) -> Llama:
        """Return the object itself; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments that make an equal object; the counters and pools of the cache stay here."""
        cache = self.expert_cache
        fresh = cache and ExpertCache(slots=cache.slots, policy=cache._policy, strict=cache.strict)
        return {**super().__getstate__(), **self._placement, "expert_cache": fresh}


@contextlib.contextmanager
def _expert_placement(n_cpu_moe: int) -> Iterator[None]:
    """Place the experts of the models that this thread loads in the block."""
    check(lib.hotmoe_load_begin(ffi.new("struct hotmoe_load_options *", {"n_cpu_moe": n_cpu_moe})))
    try:
        yield
    finally:
        lib.hotmoe_load_end()
