"""What the disk can do, and what of a file lies in the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = mmap.PAGESIZE
ALIGN = 4096
MADV_RANDOM = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def drop_from_cache(files: Sequence[Path]) -> None:
    """Write files back and take them out of the page cache. Pages that some process has mapped stay."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(files: Sequence[Path]) -> float:
    """Return how much of files lies in the page cache, 0 to 1."""
    there = pages = 0
    for file in files:
        size = file.stat().st_size
        n = -(-size // PAGE)
        flags = bytearray(n)
        with file.open("rb") as f:
            at = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, f.fileno(), 0)
        try:
            if _libc.mincore(at, size, (ctypes.c_char * n).from_buffer(flags)) != 0:
                raise OSError(ctypes.get_errno(), f"mincore of {file}")
        finally:
            _libc.munmap(at, size)
        pages += n
        there += sum(flag & 1 for flag in flags)
    return there / max(1, pages)


def advise_mappings(files: Sequence[Path], advice: int = MADV_RANDOM) -> int:
    """Give an advice on all mappings of files in this process; return the bytes that it was given on.

    Raises:
        OSError: If the system refuses it.
    """
    names = {str(file.resolve()) for file in files}
    done = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in names:
            begin, end = (int(text, 16) for text in fields[0].split("-"))
            if _libc.madvise(begin, end - begin, advice) != 0:
                raise OSError(ctypes.get_errno(), f"madvise of {fields[5]}")
            done += end - begin
    return done


def measure_disk(file: Path, block_bytes: int, readers: Sequence[int] = (1, 8), seconds: float = 2.0) -> dict[str, Any]:
    """Measure random reads of a file past the page cache.

    Args:
        file: Any large file.
        block_bytes: Bytes per read, rounded up to `ALIGN`.
        readers: Numbers of readers to try, each with one read at a time.
        seconds: For each number.

    Returns:
        `bytes_per_second` of the best, `by_readers`, `block_bytes`, `direct` (False if the file system refuses O_DIRECT: pages
        are dropped before each round then) and `tool`, fio where it is installed.
    """
    block = -(-block_bytes // ALIGN) * ALIGN
    fio = shutil.which("fio")
    measure = _fio if fio else _threads
    rates = {}
    direct = True
    for n in readers:
        drop_from_cache([file])
        rates[n], direct = measure(file, block, n, seconds)
    return {
        "bytes_per_second": max(rates.values()),
        "by_readers": {str(n): rate for n, rate in rates.items()},
        "block_bytes": block,
        "direct": direct,
        "tool": "fio" if fio else "threads with preadv",
    }


def _fio(file: Path, block: int, n: int, seconds: float) -> tuple[float, bool]:
    for direct in (1, 0):
        command = (
            f"fio --name=read --readonly --rw=randread --bs={block} --direct={direct} --ioengine=psync --numjobs={n} --thread "
            f"--group_reporting --time_based --runtime={seconds:g} --output-format=json"
        )
        done = subprocess.run([*command.split(), f"--filename={file}"], capture_output=True, text=True, check=False)
        with contextlib.suppress(ValueError, KeyError, IndexError):
            rate = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"]
            if done.returncode == 0 and rate:
                return float(rate), bool(direct)
    raise RuntimeError(f"fio failed on {file}: {done.stderr.strip()[-300:]}")


def _threads(file: Path, block: int, n: int, seconds: float) -> tuple[float, bool]:
    try:
        fd, direct = os.open(file, os.O_RDONLY | os.O_DIRECT), True
        os.preadv(fd, [mmap.mmap(-1, ALIGN)], 0)
    except OSError:  # tmpfs and some others
        fd, direct = os.open(file, os.O_RDONLY), False
    n_blocks = max(1, file.stat().st_size // block)
    done = [0] * n
    with _closing(fd):
        end = time.monotonic() + seconds

        def read(i: int) -> None:
            rng, buffer = random.Random(i), mmap.mmap(-1, block)  # anonymous memory is aligned to pages
            while time.monotonic() < end:
                done[i] += os.preadv(fd, [buffer], rng.randrange(n_blocks) * block)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(n)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / (time.monotonic() - start), direct


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
