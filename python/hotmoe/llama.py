"""llama-cpp-python's `Llama` with an expert cache, and with what it leaves to be desired around loading and threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from ._arguments import STORES
from ._attach import attach
from ._binding import lib, text
from ._log import capture_log
from ._perplexity import perplexity
from ._placement import LoadOptions, TensorOverrides, n_host_layers, warn_about_overrides
from ._streaming import StreamedText, rejoin
from ._turns import Turns
from ._vendor.llama_cpp import Llama as _BaseLlama
from ._vendor.llama_cpp import __version__ as _base_version
from ._vendor.llama_cpp import _internals, llama_cpp
from .cache import ExpertCache
from .errors import (
    ArgumentError,
    DecodeError,
    HotmoeError,
    LibraryError,
    LoadCancelledError,
    ModelLoadError,
    StateError,
    StoreError,
)
from .model_file import check_expert_counts, inspect_model

if text(lib.hotmoe_llama_cpp_python_version()) != _base_version:
    raise LibraryError(
        f"the libraries were built for llama-cpp-python {text(lib.hotmoe_llama_cpp_python_version())}, the vendored Python layer "
        f"is {_base_version}. Files of two installations are mixed: uninstall hotmoe and install it again"
    )

# While a model loads with verbose=False, the base class points the process's stdout and stderr to /dev/null. That hides what
# a progress callback prints and what other threads print, and two threads that load at once can lose both for good. Our
# log capture keeps the loader quiet instead. This is our own copy of the module; an installed llama_cpp keeps its own.
_internals.suppress_stdout_stderr = lambda disable=True: contextlib.nullcontext() if disable else capture_log(quiet=True)


class Llama(_BaseLlama):  # type: ignore[misc]  # the vendored layer is not typed strictly
    """A model and its context, as in llama-cpp-python, whose experts can be cached.

    Everything that llama-cpp-python's `Llama` takes and does is taken and done here too. With `expert_cache`, the defaults
    of two arguments change: `n_gpu_layers` becomes -1 (all layers on the device) and `cpu_moe` True (all experts in host
    memory).

    Threads may share an object: calls take turns, a second thread waits. A stream (`stream=True`, `generate`) is one turn
    from its first item to its last; one that is neither used up nor closed keeps other threads waiting. A new generation in
    the same thread ends it, and asking it for more raises `BusyError`.

    Ctrl-C ends a load, and an evaluation within one ubatch (`n_ubatch` tokens). The object stays usable, and what follows
    is the same as after a fresh start.

    Attributes:
        expert_cache: The cache that was given, live now; None if there is none.

    Examples:
        >>> with Llama("model.gguf", expert_cache=ExpertCache(slots=32)) as llm:  # doctest: +SKIP
        ...     print(llm("The quick brown fox", max_tokens=16)["choices"][0]["text"])
        ...     print(llm.expert_cache.stats().decode.hit_rate)
    """

    n_tokens: int  # of the base class, in the context
    input_ids: Any
    scores: Any

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_cache: ExpertCache | None = None,
        cpu_moe: bool | None = None,
        n_cpu_moe: int = 0,
        override_tensors: TensorOverrides | None = None,
        devices: str | Sequence[str] | None = None,
        progress_callback: Callable[[float], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a model.

        Args:
            model_path: A GGUF file; of a split model, its first shard.
            expert_cache: A fresh `ExpertCache`, which serves this object alone.
            cpu_moe: Keep the expert weights of all layers in host memory (-cmoe). None: True with an expert cache for
                which `n_cpu_moe` is not given either, else False.
            n_cpu_moe: Keep the expert weights of the first n layers in host memory (-ncmoe).
            override_tensors: Where tensors go (-ot), before anything else decides: {pattern: name}, a list of such pairs,
                or "pattern=name,...". A pattern is a regular expression that is searched for in the tensor's name, the first
                that is found wins; a name is that of a device ("CPU", "CUDA0") or of a buffer type. A warning tells of
                patterns that match nothing, or only some of a layer's expert tensors.
            devices: Names of the devices to offload to (-dev), a list or "CUDA0,CUDA1"; empty: none. None: all.
            progress_callback: Called while weights load with what is done, 0 to 1. If it returns False, the load is given up.
            **kwargs: The arguments of llama-cpp-python's `Llama`.

        Raises:
            ArgumentError: If an argument is wrong, for example an unknown device.
            ModelLoadError: If the model or its context cannot be made; it carries llama.cpp's last log lines. It is a
                ValueError too. Missing shards, files that are cut off and impossible numbers of experts are found before
                anything is loaded.
            LoadCancelledError: If the progress callback returned False.
            PlanError: If the size of the cache cannot be met, or there is nothing to pool.
            StateError: If `expert_cache` belongs to another object already.
        """
        self._turns = Turns(self._require_outside_policies)
        self._stack = contextlib.ExitStack()  # replaced by the base class, but close() may come before that
        self._streamed: StreamedText | None = None
        self.expert_cache: ExpertCache | None = None
        if expert_cache is not None:
            if not isinstance(expert_cache, ExpertCache):
                raise TypeError(f"expert_cache must be an ExpertCache, not {type(expert_cache).__name__}")
            expert_cache._require_new()
            kwargs.setdefault("n_gpu_layers", -1)
            cpu_moe = n_cpu_moe == 0 if cpu_moe is None else cpu_moe
            if expert_cache.streams:
                if kwargs.get("use_mlock"):
                    raise ArgumentError(
                        "use_mlock keeps the whole model in memory, streaming keeps most of it out: leave one of them"
                    )
                # pages of a mapped file bring their neighbours with them, and those are experts
                kwargs["use_mmap"] = False
            elif expert_cache.store == "resident":
                kwargs["use_mmap"] = False  # mapped memory is not pinned
        self._own_arguments = {
            "cpu_moe": bool(cpu_moe),
            "n_cpu_moe": n_cpu_moe,
            "override_tensors": override_tensors,
            "devices": devices,
        }
        self._load_options = options = LoadOptions(
            devices=devices,
            override_tensors=override_tensors,
            progress=progress_callback,
            n_host_layers=n_host_layers(bool(cpu_moe), n_cpu_moe),
            store=STORES[expert_cache.store if expert_cache else "mapped"],
            pinned_bytes=expert_cache._pinned_limit if expert_cache else 0,
        )
        file, tensors = inspect_model(model_path)
        check_expert_counts(file, kwargs.get("kv_overrides"))
        warn_about_overrides(options.overrides, tensors)

        try:
            with self._loading(file.path):
                with options.loading():
                    super().__init__(file.path, **kwargs)
                self._grow_buffers()
                if expert_cache is not None:
                    self.expert_cache = expert_cache
                    attach(self, expert_cache)
        except BaseException:
            self.close()  # device memory must not wait for the garbage collector
            raise

    # The base class fills model_params step by step and passes them on, and has no arguments for some of them. It begins
    # with an assignment of llama.cpp's defaults to this attribute: that is where ours go in. Nothing global is changed, so
    # other threads may load meanwhile.
    @property
    def model_params(self) -> Any:
        """The `llama_model_params` that the model was loaded with."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._load_options.apply(params)
        self._model_params = params

    @contextlib.contextmanager
    def _loading(self, path: str) -> Iterator[None]:
        """Turn llama-cpp-python's bare "failed to load" into an error that says why."""
        options = self._load_options
        with capture_log() as log:
            try:
                yield
            except ValueError as error:
                if options.interrupted:
                    raise KeyboardInterrupt from error
                if options.error is not None:
                    raise options.error from error
                if options.cancelled:
                    raise LoadCancelledError(f"the load of {path} was cancelled by its progress callback") from error
                from_llama_cpp = log.has_error or str(error).startswith("Failed to ")
                if isinstance(error, HotmoeError) or not from_llama_cpp:  # an argument was wrong, not the model
                    raise
                raise ModelLoadError(f"cannot load {path}: {error}", log.lines) from error
        if options.interrupted:
            raise KeyboardInterrupt

    def _grow_buffers(self) -> None:
        """Make room for as many tokens as the context has.

        llama.cpp rounds `n_ctx` up to a multiple of 256; the base class's arrays have the number that was asked for, and
        fail with a broadcast error between the two.
        """
        if len(self.input_ids) < self._n_ctx:
            self.input_ids = np.zeros((self._n_ctx,), dtype=np.intc)
            if self._logits_all:
                self.scores = np.zeros((self._n_ctx, self._n_vocab), dtype=np.single)

    # ---- evaluation ----

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those that are in the context.

        Each ubatch is a call of llama.cpp of its own, the same ubatches that it would make of a whole batch: in between,
        Ctrl-C is seen.

        Args:
            tokens: Token ids.

        Raises:
            ArgumentError: If they do not fit into the context; it is a ValueError too.
            DecodeError: If llama.cpp fails; it is a RuntimeError too.
            StoreError: If a streamed expert cannot be read; the message names file, offset and expert.
            BaseException: What a policy in Python raised. The tokens of that ubatch are not in the context then; all else is as
                before, and the pool is consistent.
        """
        with self._turns.call():
            if self.n_tokens + len(tokens) > self._n_ctx:
                raise ArgumentError(
                    f"{len(tokens)} tokens after {self.n_tokens} in the context exceed its n_ctx={self._n_ctx} tokens: shorten "
                    f"the prompt, or load the model with a larger n_ctx"
                )
            self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
            n_ubatch = min(self.context_params.n_ubatch, self.n_batch)
            try:
                for start in range(0, len(tokens), self.n_batch):
                    batch = tokens[start : start + self.n_batch]
                    for i in range(0, len(batch), n_ubatch):
                        part = batch[i : i + n_ubatch]
                        self._eval_ubatch(part, wants_logits=i + len(part) == len(batch))
            except BaseException:
                self._rewind()
                raise

    def _eval_ubatch(self, tokens: Sequence[int], *, wants_logits: bool) -> None:
        begin, end = self.n_tokens, self.n_tokens + len(tokens)
        self._batch.set_batch(batch=tokens, n_past=begin, logits_all=self._logits_all)
        if not wants_logits and not self._logits_all:
            self._batch.batch.logits[len(tokens) - 1] = False
        self._decode()
        self.input_ids[begin:end] = tokens
        if self._logits_all:
            logits = np.ctypeslib.as_array(self._ctx.get_logits(), shape=(len(tokens), self._n_vocab))
            self.scores[begin:end, :] = logits
        self.n_tokens = end
        self._requires_eval = False

    def _decode(self) -> None:
        """Run the batch.

        Raises:
            DecodeError: If llama.cpp fails.
            BaseException: What a policy in Python raised meanwhile; llama.cpp went on with other victims.
        """
        with self._evaluating(), capture_log() as log:
            status = llama_cpp.llama_decode(self._ctx.ctx, self._batch.batch)
        self._raise_pending()
        if status != 0:
            self._raise_store_error()
            raise DecodeError(status, log.lines)

    def _evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Keep other threads away from the cache for a block that evaluates."""
        return contextlib.nullcontext() if self.expert_cache is None else self.expert_cache._evaluating

    def _require_outside_policies(self) -> None:
        if self.expert_cache is not None:
            self.expert_cache._require_outside()

    def _raise_pending(self) -> None:
        if self.expert_cache is not None:
            self.expert_cache._raise_pending()

    def _raise_store_error(self) -> None:
        """Raise StoreError if the evaluation that just failed did so because experts could not be read."""
        if self.expert_cache is not None and (reason := self.expert_cache._take_store_error()):
            raise StoreError(f"{reason}. The tokens of this evaluation are not in the context; it can be tried again")

    def _rewind(self) -> None:
        """Make the context hold what `n_tokens` says, after an evaluation that did not come to its end."""
        self._requires_eval = True  # there may be no logits of the last token
        if self._is_recurrent or self._is_hybrid:  # cannot forget a part
            self.reset()
        else:
            self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)

    def perplexity(self, text: str, *, n_window: int | None = None) -> float:
        """Return the perplexity of a text: e to the mean negative log-likelihood (nats) of its tokens.

        As llama-perplexity does it: the text is cut into windows of `n_window` tokens that do not overlap, each is evaluated
        from an empty context with the begin token (if the model has one) in its first place, and the tokens of its second
        half are scored, each given all before it in the window. What is left at the end is not scored. A text that
        fits into one window is scored from its second token on. What was in the context is lost.

        Args:
            text: Any text.
            n_window: Tokens per window, 2 to the context's size. None: the context's size.

        Raises:
            ArgumentError: If the text has fewer than two tokens, or `n_window` is out of range.
        """
        with self._turns.call():
            try:
                return perplexity(self, text, n_window)
            finally:
                self.reset()
                self._ctx.kv_cache_clear()

    # ---- one call at a time ----

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Generate tokens, as in llama-cpp-python."""
        base = super().generate
        return self._turns.stream(lambda: self._recorded(base, tokens, args, kwargs))

    def _recorded(self, base: Any, tokens: Sequence[int], args: Any, kwargs: Any) -> Generator[int, Any, None]:
        text = self._streamed
        if text is None:
            yield from base(tokens, *args, **kwargs)
            return
        text.begin(tokens)
        for token in base(tokens, *args, **kwargs):
            if not llama_cpp.llama_vocab_is_eog(self._model.vocab, token):
                text.add(token)
            yield token

    def _create_completion(self, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        base = super()._create_completion
        return self._turns.stream(lambda: self._completion(base, *args, **kwargs))

    def _completion(self, base: Any, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        if not kwargs.get("stream"):
            yield from base(*args, **kwargs)
            return
        stop = kwargs.get("stop") or []
        stops = [s.encode("utf-8") for s in ([stop] if isinstance(stop, str) else stop)]
        # the base class begins the completion of an empty prompt with the begin token
        lead = [] if len(kwargs["prompt"] if "prompt" in kwargs else args[0]) else [self.token_bos()]
        text = StreamedText(stops, lambda tokens, before: self.detokenize(tokens, prev_tokens=before), lead)
        self._streamed = text
        try:
            yield from rejoin(base(*args, **kwargs), text)
        finally:
            if self._streamed is text:
                self._streamed = None

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample a token, as in llama-cpp-python."""
        with self._turns.call():
            token: int = super().sample(*args, **kwargs)
            return token

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embed text, as in llama-cpp-python.

        Raises:
            StoreError: If a streamed expert cannot be read; the message names file, offset and expert.
        """
        with self._turns.call():
            try:
                with self._evaluating():
                    embedding = super().embed(*args, **kwargs)
            except RuntimeError:
                self._raise_pending()
                self._raise_store_error()
                raise
            self._raise_pending()
            return embedding

    def reset(self) -> None:
        """Forget the tokens in the context."""
        with self._turns.call():
            super().reset()

    def save_state(self) -> Any:
        """Return a copy of the context's state, as in llama-cpp-python."""
        with self._turns.call():
            return super().save_state()

    def load_state(self, state: Any) -> None:
        """Restore a state that `save_state` returned."""
        with self._turns.call():
            super().load_state(state)

    # ---- end of life ----

    def close(self) -> None:
        """Free the cache's pools, the context, the model and the arrays. More than once is fine.

        Waits for a call that another thread is in; ends a stream that is not used up. Any later call raises `StateError`.
        """
        stack = self.__dict__.get("_stack")
        if stack is None or not self._turns.close():
            return
        stack.close()
        closed = _Closed()
        for name in ("_model", "_ctx", "_batch", "tokenizer_"):
            if name in self.__dict__:
                setattr(self, name, closed)
        self._sampler = self._candidates = None
        self.input_ids = np.zeros((0,), dtype=np.intc)
        self.scores = np.zeros((0, 0), dtype=np.single)
        self.n_tokens = 0

    def __enter__(self) -> Llama:
        """Return the object itself; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments that make an equal object; the counters and pools of the cache stay here."""
        return {**super().__getstate__(), **self._own_arguments, "expert_cache": self.expert_cache}


class _Closed:
    """Stands where freed objects were: C code would follow their dangling pointers."""

    def __getattr__(self, name: str) -> Any:
        raise StateError("this Llama is closed")
