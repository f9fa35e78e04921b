"""What the tests of tier managers share: files in the page cache, a model whose experts have pages, an engine."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hotmoe
from hotmoe._native import ffi, lib
from hotmoe.tiers import TierBank, TierManager
from tests.harness import ALL, Logits, Runner, tokens_for

WILLNEED, DONTNEED = lib.HOTMOE_TIER_WILLNEED, lib.HOTMOE_TIER_DONTNEED
PAGE = mmap.PAGESIZE
ADVISED, FAILED, REFUSED = 0, 1, 2  # of hotmoe_testing_advise
N_LAYER, N_EXPERT, TOP_K = 2, 16, 2

libc = ctypes.CDLL(None, use_errno=True)


def pages_in_cache(address: int, size: int) -> list[bool]:
    """Return which pages of a mapping are in the page cache; address and size are whole pages."""
    states = (ctypes.c_ubyte * (size // PAGE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states) == 0
    return [bool(s & 1) for s in states]


class Mapped:
    """A file of random bytes, mapped."""

    def __init__(self, path: Path, n_pages: int, flags: int = mmap.MAP_SHARED, prot: int = mmap.PROT_READ) -> None:
        self.data = np.random.default_rng(0).bytes(n_pages * PAGE)
        path.write_bytes(self.data)
        self.file = os.open(path, os.O_RDWR)
        os.fsync(self.file)  # the system keeps pages that are not on the disk yet
        self.map = mmap.mmap(self.file, n_pages * PAGE, flags=flags, prot=prot)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self.map)))
        self.size = n_pages * PAGE

    def cached(self) -> list[bool]:
        return pages_in_cache(self.address, self.size)

    def drop(self) -> None:
        """Take the whole file out of the page cache."""
        assert libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), 4) == 0  # MADV_DONTNEED
        os.posix_fadvise(self.file, 0, self.size, os.POSIX_FADV_DONTNEED)
        assert not any(self.cached()), "this file system keeps pages in spite of DONTNEED: set TMPDIR to a folder on a disk"

    def fill(self) -> None:
        """Bring all pages in, one by one: no large folio then holds what lies on both sides of an end of a range."""
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(0, self.size, PAGE):
            os.pread(self.file, PAGE, at)
        assert all(self.cached())


def advise(address: int, size: int, advice: int) -> tuple[int, int]:
    """Return the result and the bytes of the pages."""
    n_bytes = ffi.new("uint64_t *")
    return lib.hotmoe_testing_advise(ffi.cast("void *", address), size, advice, n_bytes), n_bytes[0]


def until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for what happens in the background; return whether it did."""
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return done


SPEC: dict[str, Any] = {"arch": "olmoe", "quant": "Q8_0", "n_ff_exp": 512, "n_expert": N_EXPERT, "n_expert_used": TOP_K}


class Recorder(TierManager):
    """Keeps what it is told, and asks for what `answer` says."""

    def __init__(self, answer: Callable[[np.ndarray, np.ndarray], Any] = lambda used, dropped: None) -> None:
        self.answer = answer
        self.steps: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]], dict[str, Any]]] = []
        self.banks: list[TierBank] = []
        self.resets = 0

    def setup(self, banks: Any, **kw: Any) -> None:
        self.banks = list(banks)

    def on_step(self, used: Any, dropped: Any, **kw: Any) -> Any:
        self.steps.append((used.tolist(), dropped.tolist(), kw))
        return self.answer(used, dropped)

    def reset(self) -> None:
        self.resets += 1


class Engine:
    """A runner with a cache that has a tier manager."""

    def __init__(self, model: Path, runner: dict[str, Any] | None = None, **options: Any) -> None:
        self.runner = Runner(model, **({"cpu_moe": ALL} | (runner or {})))
        self.cache = hotmoe.ExpertCache(**({"slots": 4} | options))
        try:
            self.cache._attach(self.runner.address())
        except BaseException:
            self.runner.close()
            raise
        self.native = self.cache._native

    @property
    def tier(self) -> Any:
        stats = self.cache.stats().tier
        assert stats is not None
        return stats

    def run(self, ubatch: int = 1, n: int = 12) -> Logits:
        return self.runner.run(tokens_for(n, self.runner.n_vocab), ubatch)

    def resident(self, layer: int, expert: int) -> tuple[int, int]:
        """Return the bytes of an expert's own pages, and those that are in the page cache."""
        n_bytes, there = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        assert lib.hotmoe_tier_resident(self.native, layer, expert, n_bytes, there) == 0
        return n_bytes[0], there[0]

    def close(self) -> None:
        try:
            self.cache.close()
        finally:
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def everything(advice: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    return lambda used, dropped: {advice: [(layer, e) for layer in range(N_LAYER) for e in range(N_EXPERT)]}
