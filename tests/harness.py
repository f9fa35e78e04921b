"""Low-level driving of llama.cpp and of the cache, for tests that compare bits.

Tests here decide the size of every ubatch and read all logits, which the high-level class does not offer. A ``Runner``
owns one model and one context; a ``Pool`` is a cache attached to a runner's context, and can come and go.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotmoe._native import ffi, lib
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from hotmoe._vendor.llama_cpp._ggml import libggml

ALL = -1  # experts of all layers
NONE = 0  # no expert is moved by us

Logits = npt.NDArray[np.float32]


def native_error() -> str:
    """Return the last error of the C API on this thread."""
    return ffi.string(lib.hotmoe_last_error()).decode()


def device(name: str) -> int:
    """Return the address of a ggml device by name."""
    by_name = libggml.ggml_backend_dev_by_name
    by_name.restype, by_name.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    found = by_name(name.encode())
    assert found, f"there is no device {name}"
    return int(found)


@contextmanager
def placed(n_cpu_moe: int | None, store: int = lib.HOTMOE_STORE_MAPPED) -> Iterator[None]:
    """Load models with experts placed by us; None: leave the loader alone."""
    if n_cpu_moe is None:
        yield
        return
    options = ffi.new("struct hotmoe_load_options *", {"n_cpu_moe": n_cpu_moe, "store": store})
    assert lib.hotmoe_load_begin(options) == 0
    try:
        yield
    finally:
        lib.hotmoe_load_end()


GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR = 3, 4


@ll.llama_log_callback
def _log_warnings(level: int, text: bytes, user_data: int) -> None:
    """Print warnings and errors; llama.cpp's INFO and DEBUG lines would bury them."""
    if level in (GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR):
        print(text.decode(errors="replace"), end="", file=sys.stderr)


ll.llama_log_set(_log_warnings, None)


class Runner:
    """One model and one context.

    Args:
        path: GGUF file.
        cpu_moe: layers whose experts go to host memory (``ALL``, a number, or None for stock placement).
        gpu_layers: layers on the device; -1 for all.
        devices: names of the devices the model may use besides the CPU; () for none.
        extra_bufts: allow the CPU to repack weights.
        tensor_split: share of the layers that each device gets.
        stream: read experts from the file when they are needed; implies ``cpu_moe=ALL`` and no mmap.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        cpu_moe: int | None = None,
        gpu_layers: int = -1,
        devices: Sequence[str] = ("SIM0",),
        extra_bufts: bool = True,
        n_ctx: int = 256,
        n_ubatch: int = 64,
        n_threads: int = 1,
        mmap: bool = True,
        n_seq_max: int = 1,
        cb_eval: Any = None,
        tensor_split: Sequence[float] = (),
        op_offload: bool = True,
        stream: bool = False,
    ) -> None:
        self.owns_model = True
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 999 if gpu_layers < 0 else gpu_layers
        params.use_extra_bufts = extra_bufts
        params.load_mode = ll.LLAMA_LOAD_MODE_MMAP if mmap and not stream else ll.LLAMA_LOAD_MODE_NONE
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*map(device, devices), None)
        params.devices = ctypes.addressof(self._devices)
        self._split = (ctypes.c_float * ll.llama_max_devices())(*tensor_split)
        if tensor_split:
            params.tensor_split = self._split
        with placed(*((ALL, lib.HOTMOE_STORE_STREAM) if stream else (cpu_moe,))):
            self.model = ll.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"could not load {path}"
        self.vocab = ll.llama_model_get_vocab(self.model)
        self.n_vocab = ll.llama_vocab_n_tokens(self.vocab)
        self.ctx = self.new_context(n_ctx, n_ubatch, n_threads, n_seq_max=n_seq_max, cb_eval=cb_eval, op_offload=op_offload)
        self.batch = ll.llama_batch_init(max(n_ubatch, 1), 0, 1)
        self.n_past = 0

    def new_context(self, n_ctx: int, n_ubatch: int, n_threads: int, **options: Any) -> Any:
        """Make a context; further options are fields of llama_context_params, None leaves the default."""
        params = ll.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        for name, value in options.items():
            if value is not None:
                setattr(params, name, value)
        ctx = ll.llama_init_from_model(self.model, params)
        assert ctx, "could not create a context"
        return ctx

    @classmethod
    def sharing(cls, other: Runner, n_ctx: int = 256, n_ubatch: int = 64) -> Runner:
        """Return a runner with a context of its own over another runner's model."""
        runner = cls.__new__(cls)
        runner.model, runner.vocab, runner.n_vocab = other.model, other.vocab, other.n_vocab
        runner.owns_model = False
        runner.ctx = runner.new_context(n_ctx, n_ubatch, 1)
        runner.batch = ll.llama_batch_init(n_ubatch, 0, 1)
        runner.n_past = 0
        return runner

    def address(self) -> int:
        """Return the context's address for the C API."""
        return ctypes.cast(self.ctx, ctypes.c_void_p).value or 0

    def reset(self) -> None:
        """Forget the sequence."""
        ll.llama_memory_clear(ll.llama_get_memory(self.ctx), True)
        self.n_past = 0

    def decode(self, tokens: Sequence[int], *, outputs: bool = True) -> Logits:
        """Run one ubatch and return the logits of all its tokens, [n_tokens, n_vocab]; none without outputs."""
        self.fill([(token, self.n_past + i, 0) for i, token in enumerate(tokens)], outputs=outputs)
        status = ll.llama_decode(self.ctx, self.batch)
        if status != 0:
            msg = f"llama_decode returned {status}"
            raise RuntimeError(msg)
        self.n_past += len(tokens)
        if not outputs:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        rows = [np.ctypeslib.as_array(ll.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)) for i in range(len(tokens))]
        return np.array(rows, dtype=np.float32)

    def fill(self, rows: Sequence[tuple[int, int, int]], *, outputs: bool = True) -> None:
        """Put (token, position, sequence) rows into the batch."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = outputs

    def run(self, tokens: Sequence[int], ubatch: int, *, rebuild: bool = False) -> Logits:
        """Run a fresh sequence in ubatches of a given size; return all logits, [n_tokens, n_vocab].

        Args:
            tokens: [n_tokens] ids.
            ubatch: tokens in each ubatch, the last may have fewer.
            rebuild: make the context reserve its graphs anew between any two ubatches.
        """
        self.reset()
        rows = []
        for start in range(0, len(tokens), ubatch):
            if rebuild and start:
                self.force_reserve()
            rows.append(self.decode(tokens[start : start + ubatch]))
        return np.concatenate(rows)

    def force_reserve(self) -> None:
        """Make the context throw its graphs away and reserve again before the next ubatch."""
        # clearing the control vector, of which there is none, has no other effect
        assert ll.llama_set_adapter_cvec(self.ctx, None, 0, 0, 0, 0) == 0

    def close(self) -> None:
        if self.ctx:
            ll.llama_batch_free(self.batch)
            ll.llama_free(self.ctx)
            if self.owns_model:
                ll.llama_model_free(self.model)
            self.ctx = self.model = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


@dataclass(frozen=True)
class Counters:
    """Counters of ``struct hotmoe_counters`` that the tests look at; bytes where the name says so."""

    events: int
    hits: int
    misses: int
    evictions: int
    uploads: int
    uploaded_bytes: int
    waves: int
    hook_ns: int
    bypassed: tuple[int, ...]


class Pool:
    """A cache attached to a runner's context."""

    def __init__(
        self,
        runner: Runner,
        slots: int | str,
        policy: str = "lru",
        *,
        admission: str = "always",
        strict: bool = True,
        record: bool = False,
        host_slots: int | str = "",
        host_policy: str | None = None,
        host_admission: str | None = None,
        io_threads: int = 0,
        direct: int = lib.HOTMOE_DIRECT_AUTO,
    ) -> None:
        given = {
            "slots": str(slots),
            "policy": policy,
            "admission": admission,
            "host_slots": str(host_slots),
            "host_policy": host_policy,
            "host_admission": host_admission,
        }
        self._texts = {name: ffi.new("char[]", text.encode()) for name, text in given.items() if text is not None}
        params = ffi.new("struct hotmoe_cache_params *", self._texts)
        params.io_threads, params.direct = io_threads, direct
        params.strict = strict
        params.record = record
        out = ffi.new("struct hotmoe_cache **")
        context = ffi.cast("struct llama_context *", runner.address())
        self.status = lib.hotmoe_cache_attach(context, params, out)
        self.error = native_error() if self.status else ""
        self.cache = out[0] if self.status == 0 else None

    @property
    def n_banks(self) -> int:
        return lib.hotmoe_plan_n_banks(self.cache)

    def bank(self, i: int) -> Any:
        row = ffi.new("struct hotmoe_plan_bank *")
        assert lib.hotmoe_plan_get_bank(self.cache, i, row) == 0
        return row

    def stats(self, bank: int = -1, phase: int = -1) -> Counters:
        c = ffi.new("struct hotmoe_counters *")
        assert lib.hotmoe_cache_stats(self.cache, bank, phase, c) == 0
        fields = ("events", "hits", "misses", "evictions", "uploads", "uploaded_bytes", "waves", "hook_ns")
        return Counters(*(getattr(c, name) for name in fields), tuple(c.bypassed))

    def steps(self, phase: int = -1) -> Any:
        s = ffi.new("struct hotmoe_step_counters *")
        assert lib.hotmoe_cache_step_stats(self.cache, phase, s) == 0
        return s

    def store(self) -> Any:
        """Return the counters of the readers and of tier 2; those of the readers are of all contexts over the model."""
        c = ffi.new("struct hotmoe_store_counters *")
        assert lib.hotmoe_cache_store_stats(self.cache, c) == 0
        return c

    def take_store_error(self) -> str:
        return ffi.string(lib.hotmoe_cache_take_store_error(self.cache)).decode()

    def reset_stats(self) -> None:
        lib.hotmoe_cache_reset_stats(self.cache)

    def clear(self) -> None:
        assert lib.hotmoe_cache_clear(self.cache) == 0

    def set_fault(self, fault: int) -> None:
        lib.hotmoe_testing_set_fault(self.cache, fault)

    def slot_map(self, bank: int) -> list[int]:
        n = self.bank(bank).n_slots
        experts = ffi.new("int32_t[]", n)
        assert lib.hotmoe_cache_slot_map(self.cache, bank, experts, n) == n
        return list(experts)

    def wrong_slots(self) -> list[tuple[int, int, int]]:
        """Return (bank, tensor, slot) of every occupied slot whose bytes are not its expert's bytes."""
        wrong = []
        size = ffi.new("size_t *")
        for b in range(self.n_banks):
            row = self.bank(b)
            for slot, expert in enumerate(self.slot_map(b)):
                if expert < 0:
                    continue
                for t in range(row.n_tensors):
                    host = lib.hotmoe_testing_host_expert(self.cache, b, t, expert, size)
                    if self.read_slot(b, t, slot) != ffi.buffer(host, size[0])[:]:
                        wrong.append((b, t, slot))
        return wrong

    def read_slot(self, bank: int, tensor: int, slot: int) -> bytes:
        """Return the bytes of a slot, read back from the device."""
        size = ffi.new("size_t *")
        assert lib.hotmoe_testing_host_expert(self.cache, bank, tensor, 0, size) != ffi.NULL
        data = ffi.new("char[]", size[0])
        assert lib.hotmoe_testing_read_slot(self.cache, bank, tensor, slot, data, size[0]) == 0
        return bytes(ffi.buffer(data, size[0]))

    def host_address(self, bank: int, tensor: int, expert: int) -> int:
        """Return where an expert's bytes lie in host memory."""
        size = ffi.new("size_t *")
        return int(ffi.cast("uintptr_t", lib.hotmoe_testing_host_expert(self.cache, bank, tensor, expert, size)))

    def close(self) -> None:
        if self.cache is not None:
            lib.hotmoe_cache_free(self.cache)
            self.cache = None

    def __enter__(self) -> Pool:
        assert self.status == 0, self.error
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def run_script(code: str, *, seconds: int = 300, **env: str) -> str:
    """Run Python code in a process of its own, from the root of the repository; return what it printed.

    Args:
        code: may be indented.
        seconds: a process that takes longer hangs, and fails the test.
        **env: environment variables to add.
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parent.parent,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def tokens_for(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Return n varied token ids."""
    low = min(300, n_vocab // 2)
    return [int(t) for t in np.random.default_rng(seed).integers(low, n_vocab, n)]


def equal_bits(a: Logits, b: Logits) -> bool:
    """Return whether two arrays hold the same bits (NaN equals the same NaN; 0.0 is not -0.0)."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
