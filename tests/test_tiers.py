"""Tier managers: what they are told, what comes of what they ask for, and that they cannot do harm."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hotmoe
from hotmoe._native import ffi, lib
from hotmoe.policies.registry import resolve
from hotmoe.tiers import EXPERT, TIERS, NoTier, Readahead, TierBank, TierManager, register_tier_manager
from tests.harness import ALL, Logits, Runner, equal_bits, tokens_for
from tests.models import cached_model

WILLNEED, DONTNEED = lib.HOTMOE_TIER_WILLNEED, lib.HOTMOE_TIER_DONTNEED
PAGE = mmap.PAGESIZE
ADVISED, FAILED, REFUSED = 0, 1, 2  # of hotmoe_testing_advise
N_LAYER, N_EXPERT, TOP_K = 2, 16, 2

libc = ctypes.CDLL(None, use_errno=True)


# ---- pages and files ----


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


@given(address=st.integers(0, 2**40), size=st.integers(0, 2**26), page=st.sampled_from([4096, 16384, 65536]))
@settings(max_examples=500, deadline=None)
def test_rounding(address: int, size: int, page: int) -> None:
    begin, end = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    last = address + size

    lib.hotmoe_testing_round(address, size, WILLNEED, page, begin, end)
    b, e = begin[0], end[0]
    assert b % page == e % page == 0
    if size:
        assert address - page < b <= address
        assert last <= e < last + page
    else:
        assert b == e

    lib.hotmoe_testing_round(address, size, DONTNEED, page, begin, end)
    b, e = begin[0], end[0]
    assert b % page == e % page == 0
    assert address <= b <= e
    if b < e:
        assert b < address + page
        assert last - page < e <= last
    else:  # no whole page lies inside
        assert (address + page - 1) // page * page + page > last


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
@pytest.mark.parametrize(
    ("first", "size"), [(0, 8 * PAGE), (1, 8 * PAGE), (PAGE - 1, 7 * PAGE + 2), (PAGE + 32, PAGE), (64, 200)]
)
def test_dontneed_lets_go_of_the_pages_inside_alone(tmp_path: Path, flags: int, first: int, size: int) -> None:
    m = Mapped(tmp_path / "file", 32, flags)
    m.drop()
    m.fill()
    assert m.map[:] == m.data  # all pages are in this process, too
    start = 4 * PAGE + first
    inside = [start <= i * PAGE and (i + 1) * PAGE <= start + size for i in range(32)]
    assert advise(m.address + start, size, DONTNEED) == (ADVISED, PAGE * sum(inside))
    assert m.cached() == [not x for x in inside]
    assert m.map[:] == m.data


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
@pytest.mark.parametrize(("first", "size"), [(0, 8 * PAGE), (1, 8 * PAGE), (PAGE - 1, 2), (64, 200)])
def test_willneed_reads_the_pages_that_are_touched(tmp_path: Path, flags: int, first: int, size: int) -> None:
    m = Mapped(tmp_path / "file", 32, flags)
    m.drop()
    start = 4 * PAGE + first
    touched = [i * PAGE < start + size and start < (i + 1) * PAGE for i in range(32)]
    assert advise(m.address + start, size, WILLNEED) == (ADVISED, PAGE * sum(touched))
    assert until(lambda: m.cached() == touched)


def test_willneed_reads_more_than_the_systems_window(tmp_path: Path) -> None:
    """Linux cuts a longer range at the read-ahead window without a word."""
    m = Mapped(tmp_path / "file", (48 << 20) // PAGE)
    m.drop()
    assert advise(m.address, m.size, WILLNEED) == (ADVISED, m.size)
    assert until(lambda: all(m.cached()))


def test_memory_without_a_file_is_refused() -> None:
    m = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, 8 * PAGE)
    for memory in (m, shared):
        memory[:] = b"x" * (8 * PAGE)
        address = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
        assert advise(address, 8 * PAGE, DONTNEED) == (REFUSED, 0)
        assert advise(address, 8 * PAGE, WILLNEED) == (REFUSED, 0)
        assert memory[:] == b"x" * (8 * PAGE)
    assert advise(PAGE, 8 * PAGE, DONTNEED) == (REFUSED, 0)
    assert advise(2**64 - PAGE, 2 * PAGE, DONTNEED) == (REFUSED, 0)


def test_private_copies_are_refused(tmp_path: Path) -> None:
    """What was written to a private mapping is nowhere else: not even when the mapping is read-only by now."""
    m = Mapped(tmp_path / "file", 8, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    m.map[2 * PAGE : 2 * PAGE + 4] = b"mine"
    assert advise(m.address, m.size, DONTNEED) == (REFUSED, 0)
    assert advise(m.address, m.size, WILLNEED) == (REFUSED, 0)
    assert libc.mprotect(ctypes.c_void_p(m.address), ctypes.c_size_t(m.size), mmap.PROT_READ) == 0
    assert advise(m.address, m.size, DONTNEED) == (REFUSED, 0)
    assert m.map[2 * PAGE : 2 * PAGE + 4] == b"mine"
    assert advise(m.address + 3 * PAGE, 5 * PAGE, DONTNEED) == (ADVISED, 5 * PAGE)  # nothing was written there
    assert m.map[2 * PAGE : 2 * PAGE + 4] == b"mine"


def test_a_range_beyond_the_mapping_and_a_deleted_file_are_refused(tmp_path: Path) -> None:
    m = Mapped(tmp_path / "file", 8)
    assert libc.munmap(ctypes.c_void_p(m.address + 6 * PAGE), ctypes.c_size_t(2 * PAGE)) == 0
    assert advise(m.address, 6 * PAGE, DONTNEED) == (ADVISED, 6 * PAGE)
    assert advise(m.address, 6 * PAGE + 1, DONTNEED) == (REFUSED, 0)
    (tmp_path / "file").unlink()
    assert advise(m.address, 6 * PAGE, DONTNEED) == (REFUSED, 0)
    (tmp_path / "file").write_bytes(b"another file")
    assert advise(m.address, 6 * PAGE, DONTNEED) == (REFUSED, 0)


def test_odd_file_names_and_parts_of_other_access(tmp_path: Path) -> None:
    m = Mapped(tmp_path / "a b\nc (deleted) \\", 8)
    assert libc.mprotect(ctypes.c_void_p(m.address + 4 * PAGE), ctypes.c_size_t(PAGE), 0) == 0  # PROT_NONE
    assert advise(m.address, m.size, DONTNEED) == (ADVISED, m.size)


def test_what_the_system_reports_is_an_error(tmp_path: Path) -> None:
    m = Mapped(tmp_path / "file", 8)
    assert libc.mlock(ctypes.c_void_p(m.address), ctypes.c_size_t(m.size)) == 0
    assert advise(m.address, m.size, DONTNEED) == (FAILED, m.size)
    assert all(m.cached())


# ---- in the engine ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts have 34 pages in each of three tensors; a copy of our own, all of it on the disk."""
    path = tmp_path_factory.mktemp("tiers") / "model.gguf"
    shutil.copy(cached_model(**SPEC), path)
    with path.open("rb+") as file:
        os.fsync(file)
    return path


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


@pytest.fixture(scope="module")
def stock(sim: ModuleType, model: Path) -> dict[int, Logits]:
    """Logits without a cache, by tokens per ubatch."""
    with Runner(model, cpu_moe=ALL, op_offload=False) as runner:
        return {n: runner.run(tokens_for(12, runner.n_vocab), n) for n in (1, 4)}


def lru(steps: list[Any], host_slots: int) -> Iterator[tuple[set[tuple[int, int]], set[tuple[int, int]]]]:
    """Yield what entered and what was dropped in each step, (layer, expert), by a plain reading of the definition."""
    held: dict[int, list[int]] = {layer: [] for layer in range(N_LAYER)}  # the least recent first
    for used, _, _ in steps:
        before = {(layer, e) for layer, experts in held.items() for e in experts}
        for layer, _, expert, _ in used:
            held[layer] = [e for e in held[layer] if e != expert] + [expert]
        wanted = {(layer, expert) for layer, _, expert, _ in used}
        for layer in held:
            held[layer] = held[layer][-host_slots:]
        now = {(layer, e) for layer, experts in held.items() for e in experts}
        yield now - before, (before | wanted) - now


@pytest.mark.parametrize("slots", [4, 0])
@pytest.mark.parametrize(("ubatch", "host_slots"), [(1, 2), (1, 5), (4, 6), (1, 0)])
def test_a_manager_is_told_what_happens(sim: ModuleType, model: Path, slots: int, ubatch: int, host_slots: int) -> None:
    with Engine(model, slots=slots, tier_manager=Recorder(), host_slots=host_slots) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        engine.run(ubatch, n=24)
        tier = engine.tier  # tells of the last step
        bank = manager.banks[1]
        held = host_slots or N_EXPERT
        assert (bank.layer, bank.bank, bank.n_expert, bank.host_slots) == (1, 0, N_EXPERT, held)
        assert bank.expert_bytes == 3 * 512 * 256 * 34 // 32
        assert len(manager.steps) == tier.steps == 24 // ubatch
        assert [kw["step"] for _, _, kw in manager.steps] == list(range(1, 24 // ubatch + 1))
        assert {kw["phase"] for _, _, kw in manager.steps} == {"decode" if ubatch == 1 else "prefill"}
        for (used, dropped, _), (entered, gone) in zip(manager.steps, lru(manager.steps, held), strict=True):
            assert len(set(used)) == len(used) >= 2 * TOP_K
            assert {(layer, expert) for layer, _, expert, new in used if new} == entered
            assert sorted((layer, expert) for layer, _, expert, _ in dropped) == sorted(gone)
        assert tier.used == sum(len(used) for used, _, _ in manager.steps)
        assert tier.entered == sum(new for used, _, _ in manager.steps for *_, new in used)
        assert tier.dropped == sum(len(dropped) for _, dropped, _ in manager.steps)
        assert (tier.dropped == 0) == (host_slots == 0)


def test_used_are_the_experts_of_the_routing(sim: ModuleType, model: Path) -> None:
    """Also those of ubatches that take the stock path, since their experts are more than the slots."""
    with Runner(model, cpu_moe=ALL) as runner, resolve() as resolved:
        name, _, manager = resolved.add(TIERS, Recorder)
        texts = [ffi.new("char[]", t) for t in (b"4", str(name).encode())]
        params = ffi.new("struct hotmoe_cache_params *", {"record": 1})
        params.slots, params.tier_manager = texts
        out = ffi.new("struct hotmoe_cache **")
        assert lib.hotmoe_cache_attach(ffi.cast("struct llama_context *", runner.address()), params, out) == 0
        tokens = tokens_for(20, runner.n_vocab)
        for part in (tokens[:12], tokens[12:14], *([t] for t in tokens[14:])):
            runner.decode(part)
        counters = ffi.new("struct hotmoe_tier_counters *")
        assert lib.hotmoe_tier_stats(out[0], counters) == 0
        n_events, n_ids = ffi.new("int64_t *"), ffi.new("int64_t *")
        assert lib.hotmoe_trace_size(out[0], n_events, n_ids) == 0
        events = ffi.new("struct hotmoe_trace_event[]", n_events[0])
        ids, weights = ffi.new("int32_t[]", n_ids[0]), ffi.new("float[]", n_ids[0])
        assert lib.hotmoe_trace_take(out[0], events, n_events[0], ids, weights, n_ids[0]) == 0
        truth: dict[int, set[tuple[int, int]]] = {}
        at = 0
        for event in events:
            n = event.n_tokens * event.n_used
            truth.setdefault(event.step, set()).update((event.layer, e) for e in ids[at : at + n])
            at += n
        assert isinstance(manager, Recorder)
        assert [{(layer, e) for layer, _, e, _ in used} for used, _, _ in manager.steps] == [truth[s] for s in sorted(truth)]
        lib.hotmoe_cache_free(out[0])


def everything(advice: str) -> Callable[[np.ndarray, np.ndarray], Any]:
    return lambda used, dropped: {advice: [(layer, e) for layer in range(N_LAYER) for e in range(N_EXPERT)]}


@pytest.mark.parametrize("ubatch", [1, 4])
@pytest.mark.parametrize("slots", [8, 0])
@pytest.mark.parametrize(
    "manager", ["none", "readahead", NoTier, Readahead, Recorder(everything("dontneed")), Recorder(everything("willneed"))]
)
def test_logits_are_those_of_stock(
    sim: ModuleType, model: Path, stock: dict[int, Logits], manager: Any, slots: int, ubatch: int
) -> None:
    host_slots = 8 if slots else 3
    if slots == 0 and manager == "none":
        return
    runner = {"op_offload": False} if slots == 0 else {}
    if isinstance(manager, Recorder):
        manager = Recorder(manager.answer)
    with Engine(model, runner, slots=slots, tier_manager=manager, host_slots=host_slots) as engine:
        logits = engine.run(ubatch)
        assert equal_bits(logits, stock[ubatch])
        tier = engine.cache.stats().tier
        assert (tier is None) == (manager == "none")
        if tier is not None:
            assert tier.refused_ranges == tier.refused_requests == tier.failed_steps == 0
            assert tier.willneed.errors == tier.dontneed.errors == 0
            assert (tier.willneed.calls > 0) == (manager in ("readahead", Readahead) or _asks(manager, "willneed"))
            assert (tier.dontneed.calls > 0) == (
                (manager in ("readahead", Readahead) and tier.dropped > 0) or _asks(manager, "dontneed")
            )
            assert slots or tier.dropped > 0


def _asks(manager: Any, advice: str) -> bool:
    return isinstance(manager, Recorder) and advice in manager.answer(np.empty(0, EXPERT), np.empty(0, EXPERT))


def read_page_by_page(path: Path) -> None:
    """Bring a file that nobody maps into the page cache anew, in folios of one page: no two experts then share one."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while file.read(PAGE):
            pass


def test_pages_leave_and_come_back(sim: ModuleType, model: Path) -> None:
    read_page_by_page(model)
    with Engine(model, tier_manager=Recorder()) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        everyone = [(layer, e) for layer in range(N_LAYER) for e in range(N_EXPERT)]

        def gone() -> set[tuple[int, int]]:
            """Return those of whose own pages none is in the page cache; of the others all are."""
            states = {expert: engine.resident(*expert) for expert in everyone}
            assert all(n_bytes >= 3 * 32 * PAGE for n_bytes, _ in states.values())
            assert all(cached in (0, n_bytes) for n_bytes, cached in states.values())
            return {expert for expert, (_, cached) in states.items() if cached == 0}

        def ask(answer: Any) -> Any:
            """Run a step and have this done; return the calls and bytes that it took, by advice."""
            manager.answer = lambda used, dropped: None
            before = engine.tier
            manager.answer = lambda used, dropped: answer
            engine.run(n=1)
            after = engine.tier
            return [
                (b.calls - a.calls, b.bytes - a.bytes)
                for a, b in ((before.willneed, after.willneed), (before.dontneed, after.dontneed))
            ]

        assert ask(None) == [(0, 0), (0, 0)]
        assert gone() == set()
        in_use = {(layer, e) for layer, _, e, _ in manager.steps[-1][0]}
        a, b, c, d = [expert for expert in everyone if expert not in in_use][::7]
        own = {expert: engine.resident(*expert)[0] for expert in everyone}

        assert ask({"dontneed": [a, (b[0], 0, b[1]), d]}) == [(0, 0), (9, own[a] + own[b] + own[d])]
        assert gone() == {a, b, d}
        (calls, n_bytes), dontneed = ask({"willneed": [a, d], "dontneed": [c]})
        assert until(lambda: gone() == {b, c})
        assert (calls, dontneed) == (6, (3, own[c]))
        # the pages at both ends, too, which others share
        assert own[a] + own[d] < n_bytes <= own[a] + own[d] + 6 * 2 * PAGE


def test_readahead_follows_the_count(sim: ModuleType, model: Path) -> None:
    """What was dropped last is gone, what entered last is there; in between the system reads what it likes."""
    with (
        Engine(model, slots=2, tier_manager="readahead", host_slots=2) as engine,
        Engine(model, slots=2, tier_manager=Recorder(), host_slots=2) as twin,
    ):
        n_checked = 0
        for token in tokens_for(12, engine.runner.n_vocab):
            engine.runner.decode([token])
            twin.runner.decode([token])
            tier, _ = engine.tier, twin.tier
            manager = twin.cache.tier_manager_object
            assert isinstance(manager, Recorder)
            used, dropped, _ = manager.steps[-1]
            for layer, _, expert, new in used:
                n_bytes, cached = engine.resident(layer, expert)
                assert not new or until(lambda b=n_bytes, x=layer, y=expert: engine.resident(x, y)[1] == b)
            n_checked += len(dropped)
        assert tier.dropped == n_checked > 0
        assert tier.dontneed.calls == 3 * tier.dropped
        assert tier.willneed.calls == 3 * tier.entered


# ---- answers that cannot be ----


@pytest.mark.parametrize(
    "expert",
    [(N_LAYER, 0), (-1, 0), (0, N_EXPERT), (0, -1), (0, 1, 0), (0, -1, 0), (2**31 - 1, 0), (0, 2**31 - 1), (-(2**31), -(2**31))],
)
@pytest.mark.parametrize("advice", ["willneed", "dontneed"])
def test_experts_that_there_are_not(sim: ModuleType, model: Path, stock: dict[int, Logits], expert: Any, advice: str) -> None:
    with Engine(model, tier_manager=Recorder(lambda used, dropped: {advice: [expert]})) as engine:
        assert equal_bits(engine.run(), stock[1])
        tier = engine.tier
        assert tier.refused_requests == tier.steps == 12
        assert tier.failed_steps == tier.willneed.calls == tier.dontneed.calls == 0


@pytest.mark.parametrize(
    "answer",
    [
        7,
        "willneed",
        [("willneed", 0, 1)],
        {"keep": [(0, 1)]},
        {"willneed": 5},
        {"willneed": [1, 2]},
        {"willneed": [(0, 1), (0, 0, 1)]},
        {"willneed": [(0, 1, 2, 3)]},
        {"willneed": [(0.0, 1.0)]},
        {"willneed": [("0", "1")]},
        {"dontneed": [(0, 2**31)]},
        {"dontneed": [(0, 2**70)]},
        {"dontneed": [(0, None)]},
        {"willneed": np.zeros(3, [("layer", "i4")])},
        {"willneed": [(0, 1)] * (2 * N_LAYER * N_EXPERT + 1)},
    ],
    ids=str,
)
def test_answers_that_cannot_be_understood(sim: ModuleType, model: Path, stock: dict[int, Logits], answer: Any) -> None:
    with Engine(model, tier_manager=Recorder(lambda used, dropped: answer)) as engine:
        assert equal_bits(engine.run(), stock[1])
        with pytest.raises(hotmoe.PolicyError, match=r"Recorder\.on_step"):
            engine.cache.stats()
        tier = engine.tier
        assert tier.failed_steps == tier.steps == 12
        assert tier.refused_requests == tier.willneed.calls == tier.dontneed.calls == 0


def test_as_many_requests_as_there_is_room_for(sim: ModuleType, model: Path) -> None:
    n = 2 * N_LAYER * N_EXPERT
    with Engine(model, tier_manager=Recorder(lambda used, dropped: {"willneed": [(0, 1)] * n, "dontneed": []})) as engine:
        engine.run(n=1)
        assert engine.tier.willneed.calls == 3 * n


C_MANAGER = """
#include <hotmoe/tier.h>
#include <string.h>

struct state { const char * mode; };
static struct state one;

static int32_t on_step(void * context, const struct hotmoe_tier_step * step, struct hotmoe_tier_request * requests, int32_t max_requests) {
    const struct state * s = context;
    int32_t i;
    if (strcmp(s->mode, "mode=negative") == 0) {
        return -7;
    }
    if (strcmp(s->mode, "mode=huge") == 0) {
        return max_requests + 1;
    }
    if (strcmp(s->mode, "mode=most") == 0) {
        return INT32_MAX;
    }
    for (i = 0; i < step->n_used; i++) {
        requests[i].layer  = step->used[i].layer;
        requests[i].bank   = step->used[i].bank;
        requests[i].expert = step->used[i].expert;
        requests[i].advice = strcmp(s->mode, "mode=advice") == 0 ? HOTMOE_TIER_ADVICE_COUNT - 3 * (i % 2) : HOTMOE_TIER_WILLNEED;
    }
    return step->n_used;
}

int32_t hotmoe_tier_entry(const struct hotmoe_tier_config * config, struct hotmoe_tier_manager * out) {
    static char options[64];
    if (config->struct_size != sizeof(struct hotmoe_tier_config) || config->n_banks < 1 || strlen(config->options) >= sizeof(options)) {
        return HOTMOE_ERR_ARGUMENT;
    }
    one.mode         = strcpy(options, config->options);
    out->struct_size = sizeof(*out);
    out->abi_version = HOTMOE_TIER_ABI_VERSION;
    out->context     = &one;
    out->on_step     = on_step;
    return HOTMOE_OK;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tier manager in C99."""
    folder = tmp_path_factory.mktemp("c")
    (folder / "manager.c").write_text(C_MANAGER)
    include = Path(__file__).parent.parent / "native" / "include"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed to build the package, too"
    flags = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-shared", "-fPIC", "-I", str(include)]
    subprocess.run([compiler, *flags, "-o", folder / "manager.so", folder / "manager.c"], check=True)
    return folder / "manager.so"


@pytest.mark.parametrize("mode", ["", "negative", "huge", "most", "advice"])
def test_a_manager_in_c(sim: ModuleType, model: Path, stock: dict[int, Logits], library: Path, mode: str) -> None:
    name = f"lib:{library}(mode={mode})" if mode else f"lib:{library}"
    with Engine(model, tier_manager=name) as engine:
        assert engine.cache.tier_manager == name
        assert equal_bits(engine.run(), stock[1])
        tier = engine.tier
        assert tier.steps == 12
        assert tier.failed_steps == (12 if mode in ("negative", "huge", "most") else 0)
        assert tier.refused_requests == (tier.used if mode == "advice" else 0)
        assert tier.willneed.calls == (0 if mode else 3 * tier.used)
        assert tier.dontneed.calls == 0


# ---- exceptions ----


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt(), SystemExit(3)])
def test_exceptions_are_raised_after_the_call(
    sim: ModuleType, model: Path, stock: dict[int, Logits], error: BaseException
) -> None:
    def fail(used: Any, dropped: Any) -> Any:
        if len(manager.steps) in (2, 5, 12):
            raise error
        return {"willneed": used}

    manager = Recorder(fail)
    llm = hotmoe.Llama(
        model,
        expert_cache=hotmoe.ExpertCache(slots=4, tier_manager=manager),
        n_ctx=64,
        n_threads=1,
        n_ubatch=1,
        logits_all=True,
        devices="SIM0",
        verbose=False,
    )
    tokens = tokens_for(12, llm.n_vocab())
    raised = 0
    while llm.n_tokens < 12:
        try:
            llm.eval(tokens[llm.n_tokens : llm.n_tokens + 1])
        except type(error) as caught:
            assert caught is error
            raised += 1
    assert raised >= 2
    assert llm.expert_cache is not None
    n = len(manager.steps)
    assert llm.expert_cache.attached
    if n == 11:  # the last step is not told yet
        with pytest.raises(type(error)):
            llm.expert_cache.stats()
    tier = llm.expert_cache.stats().tier
    assert tier is not None
    assert tier.failed_steps == 3
    assert tier.willneed.calls > 0
    llm.close()


def test_an_exception_about_the_last_step_is_raised_by_close(sim: ModuleType, model: Path) -> None:
    def fail(used: Any, dropped: Any) -> Any:
        raise ValueError("on purpose")

    engine = Engine(model, tier_manager=Recorder(fail))
    engine.run(n=1)
    with pytest.raises(ValueError, match="on purpose"):
        engine.cache.close()
    assert not engine.cache.attached
    engine.cache.close()
    engine.runner.close()


@pytest.mark.parametrize("where", ["setup", "make"])
def test_a_manager_that_cannot_be_made(sim: ModuleType, model: Path, where: str) -> None:
    class Broken(Recorder):
        def setup(self, banks: Any, **kw: Any) -> None:
            if where == "setup":
                raise KeyError("on purpose")

        def __init__(self) -> None:
            if where == "make":
                raise KeyError("on purpose")
            super().__init__()

    with pytest.raises(KeyError, match="on purpose"):
        Engine(model, tier_manager=Broken)
    with Runner(model, cpu_moe=ALL) as runner:  # nothing is left behind
        cache = hotmoe.ExpertCache(slots=4, tier_manager="readahead")
        cache._attach(runner.address())
        cache.close()


def test_a_manager_must_not_use_its_cache(sim: ModuleType, model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=4, tier_manager=Recorder(lambda used, dropped: cache.stats()))
    with Runner(model, cpu_moe=ALL) as runner:
        cache._attach(runner.address())
        runner.decode([300])
        with pytest.raises(hotmoe.errors.StateError, match="must not use"):
            cache.stats()
        runner.decode([301])
        with pytest.raises(hotmoe.errors.StateError, match="must not use"):
            cache.close()


# ---- arguments, names and life ----


@pytest.mark.parametrize(
    ("host_slots", "expected"),
    [(None, 16), (0, 16), ("0", 16), (3, 3), ("5", 5), ("7s", 7), (99, 16), ("24G", 16), ("6 MiB", 7), (f"{2 * 2 * 417792}", 16)],
)
def test_host_slots(sim: ModuleType, model: Path, host_slots: Any, expected: int) -> None:
    with Engine(model, tier_manager=Recorder, host_slots=host_slots) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        assert [bank.host_slots for bank in manager.banks] == [expected] * N_LAYER
        assert manager.banks[0].expert_bytes == 417792


@pytest.mark.parametrize("host_slots", [1, "1s", "1M"])
def test_too_few_host_slots_name_the_minimum(sim: ModuleType, model: Path, host_slots: Any) -> None:
    with pytest.raises(hotmoe.PlanError, match=r"host_slots.*the minimum is 2 slots, or 1632 KiB"):
        Engine(model, tier_manager="readahead", host_slots=host_slots)


@pytest.mark.parametrize("host_slots", ["auto", "many", "3/4", -1, "-2", "1.5", "1.5s", ""])
def test_host_slots_that_mean_nothing(host_slots: Any) -> None:
    if host_slots == "":
        assert hotmoe.ExpertCache(host_slots="").tier_manager == ""
        return
    with pytest.raises(hotmoe.errors.ArgumentError, match="host_slots"):
        hotmoe.ExpertCache(tier_manager="readahead", host_slots=host_slots)


def test_host_slots_need_a_manager() -> None:
    with pytest.raises(hotmoe.errors.ArgumentError, match="tier_manager"):
        hotmoe.ExpertCache(host_slots=3)
    with pytest.raises(TypeError, match="host_slots"):
        hotmoe.ExpertCache(tier_manager="readahead", host_slots=True)


def test_the_c_side_checks_host_slots(sim: ModuleType, model: Path) -> None:
    with Runner(model, cpu_moe=ALL) as runner:
        for size, status in (
            (b"auto", lib.HOTMOE_ERR_ARGUMENT),
            (b"3/4", lib.HOTMOE_ERR_ARGUMENT),
            (b"s", lib.HOTMOE_ERR_ARGUMENT),
            (b"1", lib.HOTMOE_ERR_PLAN),
        ):
            texts = [ffi.new("char[]", t) for t in (b"4", b"readahead", size)]
            params = ffi.new("struct hotmoe_cache_params *")
            params.slots, params.tier_manager, params.host_slots = texts
            out = ffi.new("struct hotmoe_cache **")
            assert lib.hotmoe_cache_attach(ffi.cast("struct llama_context *", runner.address()), params, out) == status
            assert size.decode() in ffi.string(lib.hotmoe_last_error()).decode()


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"none", "readahead"} <= set(hotmoe.cache.tier_managers())
    for spec in ("readahead", "tests.test_tiers:Recorder", Recorder, Recorder(), None, "none"):
        hotmoe.ExpertCache(tier_manager=spec)
    for spec in ("read-ahead", "tests.test_tiers:Nothing", "tests.test_tiers:TIERS", "lib:/nothing.so", "readahead(depth=3)"):
        with pytest.raises(hotmoe.PolicyError, match="tier manager"):
            hotmoe.ExpertCache(tier_manager=spec)
    with pytest.raises(hotmoe.PolicyError, match="known tier managers: none, readahead"):
        hotmoe.ExpertCache(tier_manager="read-ahead")
    with pytest.raises(TypeError, match="TierManager"):
        hotmoe.ExpertCache(tier_manager=dict)  # type: ignore[arg-type]
    with pytest.raises(hotmoe.errors.ArgumentError, match="built-in"):
        register_tier_manager("readahead")

    @register_tier_manager("test-registered")
    class Mine(Recorder):
        """Mine."""

    assert hotmoe.cache.tier_managers()["test-registered"] == "Mine."
    hotmoe.ExpertCache(tier_manager="test-registered")

    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hotmoe.tiers]\ninstalled = tests.test_tiers:Recorder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "installed" in hotmoe.cache.tier_managers()
    hotmoe.ExpertCache(tier_manager="installed")


def test_off(sim: ModuleType, model: Path) -> None:
    for manager in (None, "none"):
        with Engine(model, tier_manager=manager) as engine:
            engine.run(n=2)
            assert engine.cache.stats().tier is None
            assert engine.cache.tier_manager == ""
            assert lib.hotmoe_tier_n_banks(engine.native) == 0
    assert hotmoe.ExpertCache(slots=0, tier_manager="none").enabled is False


def test_reset_and_clear(sim: ModuleType, model: Path) -> None:
    with Engine(model, tier_manager=Recorder(lambda used, dropped: {"willneed": used}), host_slots=3) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        engine.run()
        engine.cache.reset_stats()
        assert len(manager.steps) == 12
        assert engine.tier.steps == engine.tier.willneed.calls == 0
        as_json = engine.cache.stats().as_dict()
        assert as_json["tier"]["willneed"] == {"calls": 0, "bytes": 0, "errors": 0}
        engine.cache.clear()
        assert manager.resets == 1
        manager.steps.clear()
        engine.run(n=1)
        assert engine.tier.entered == engine.tier.used == 2 * TOP_K
        assert engine.tier.dropped == 0


def test_an_object_serves_one_cache_and_is_let_go_of(sim: ModuleType, model: Path) -> None:
    manager = Recorder()
    alive = weakref.ref(manager)
    with Engine(model, tier_manager=manager) as engine:
        with pytest.raises(hotmoe.errors.StateError, match="serves another cache"):
            Engine(model, tier_manager=manager)
        engine.run(n=1)
    with Engine(model, tier_manager=manager) as engine:
        engine.run(n=1)
    assert len(manager.steps) == 2
    del manager, engine
    gc.collect()
    assert alive() is None


def test_the_last_step_is_told_when_the_model_goes_first(sim: ModuleType, model: Path) -> None:
    manager = Recorder(lambda used, dropped: {"dontneed": used})
    engine = Engine(model, tier_manager=manager)
    engine.run(n=2)
    assert len(manager.steps) == 1
    engine.runner.close()
    assert len(manager.steps) == 2
    tier = engine.tier
    assert tier.dontneed.calls == 3 * tier.used
    engine.cache.close()
    assert len(manager.steps) == 2


def test_shards_and_models_that_are_not_mapped(sim: ModuleType) -> None:
    shards = cached_model(**SPEC, shards=3)
    for mmaps in (True, False):
        with Engine(shards, {"mmap": mmaps}, tier_manager=Recorder(everything("dontneed"))) as engine:
            logits = engine.run(n=4)
            tier = engine.tier
            n = 4 * 3 * N_LAYER * N_EXPERT
            assert (tier.dontneed.calls, tier.refused_ranges) == ((n, 0) if mmaps else (0, n))
            with Runner(shards, cpu_moe=ALL) as runner:
                assert equal_bits(logits, runner.run(tokens_for(4, runner.n_vocab), 1))


# ---- twins ----

experts = st.tuples(st.integers(0, N_LAYER - 1), st.just(0), st.integers(0, N_EXPERT - 1))


@given(
    steps=st.lists(
        st.tuples(
            st.lists(experts, unique=True, min_size=1, max_size=12), st.lists(experts, unique=True, max_size=6), st.integers(0)
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize(("native", "python"), [("readahead", Readahead), ("none", NoTier)])
def test_twins_ask_for_the_same(native: str, python: type[TierManager], steps: Any) -> None:
    banks = ffi.new("struct hotmoe_tier_bank[]", [{"layer": i, "n_expert": N_EXPERT, "host_slots": 4} for i in range(N_LAYER)])
    config = ffi.new("struct hotmoe_tier_config *", {"n_banks": N_LAYER, "banks": banks})
    room = 2 * N_LAYER * N_EXPERT
    with resolve() as resolved:
        answers = []
        for name in (native, resolved.add(TIERS, python)[0]):
            manager = ffi.new("struct hotmoe_tier_manager *")
            assert lib.hotmoe_tier_create(str(name).encode(), config, manager) == 0
            rows = []
            for used, dropped, entered in steps:
                u = ffi.new("struct hotmoe_tier_expert[]", [(*e, entered >> i & 1) for i, e in enumerate(used)])
                d = ffi.new("struct hotmoe_tier_expert[]", [(*e, 0) for e in dropped])
                step = ffi.new(
                    "struct hotmoe_tier_step *",
                    {"step": 1, "n_used": len(used), "n_dropped": len(dropped), "used": u, "dropped": d},
                )
                out = ffi.new("struct hotmoe_tier_request[]", room)
                n = manager.on_step(manager.context, step, out, room)
                rows.append([(r.layer, r.bank, r.expert, r.advice) for r in out[0:n]])
            answers.append(rows)
            if manager.free:
                manager.free(manager.context)
        resolved.raise_pending()
    assert answers[0] == answers[1]
    if native == "none":
        assert not any(answers[0])
    else:
        moved = [len(dropped) + sum(entered >> i & 1 for i in range(len(used))) for used, dropped, entered in steps]
        assert [len(row) for row in answers[0]] == moved


@pytest.mark.parametrize("ubatch", [1, 4])
def test_twins_do_the_same_in_the_engine(sim: ModuleType, model: Path, ubatch: int) -> None:
    counters = []
    for manager in ("readahead", Readahead):
        with Engine(model, tier_manager=manager, host_slots=4) as engine:
            engine.run(ubatch, n=40)
            tier = engine.tier
            counters.append((tier.steps, tier.used, tier.entered, tier.dropped, tier.willneed, tier.dontneed))
    assert counters[0] == counters[1]
    assert counters[0][3] > 0
