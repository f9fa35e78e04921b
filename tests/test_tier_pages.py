"""The port to the page cache: rounding, what comes of advice, and what is refused."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotmoe._native import ffi, lib
from tests.tiers import ADVISED, DONTNEED, FAILED, PAGE, REFUSED, WILLNEED, Mapped, advise, libc, until


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
    for name in ("file", "file (deleted)"):  # the second is what the system calls it now
        (tmp_path / name).write_bytes(b"another file")
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
