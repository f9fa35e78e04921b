"""What goes wrong with a model's file while its experts are read from it. Each function runs in a process of its own.

The promise under test: an error names file, offset and expert; nothing hangs; no wrong token comes out; and the context can be
used afterwards, or says that it cannot. Reads are broken by a preloaded library (tests/native/faulty_reads.c), files by us.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hotmoe
from hotmoe._vendor.llama_cpp import llama_cpp
from hotmoe.errors import DecodeError, StoreError
from tests.harness import Logits, equal_bits, run_script, tokens_for
from tests.models import cached_model

SOURCE = Path(__file__).parent / "native" / "faulty_reads.c"
FIELDS = ("reads", "fail_from", "fail_count", "fail_errno", "longest", "delay_us", "stick_from", "release")
N_CTX, N_UBATCH, N_VOCAB = 256, 64, 512
PROMPT, NEXT = tokens_for(40, N_VOCAB), tokens_for(8, N_VOCAB, seed=1)


def in_process(scenario: Callable[..., None], folder: Path, *arguments: Any, preload: bool = True, seconds: int = 120) -> str:
    """Run a function of this module in a process of its own, in which reads can be broken; return what it printed."""
    env = {}
    if preload:
        library, control = folder / "faulty_reads.so", folder / "control"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        control.write_bytes(bytes(8 * len(FIELDS)))
        env = {"LD_PRELOAD": str(library), "HOTMOE_TEST_FAULTS": str(control)}
    call = (
        f"import tests.stream_faults as f\nfrom pathlib import Path\nf.{scenario.__name__}(Path({str(folder)!r}), *{arguments!r})"
    )
    return run_script(call, seconds=seconds, **env)


class Faults:
    """The control file of the preloaded library. Positions of reads count from the moment they are set."""

    def __init__(self) -> None:
        with Path(os.environ["HOTMOE_TEST_FAULTS"]).open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 8 * len(FIELDS))

    def get(self, name: str) -> int:
        return int(struct.unpack_from("<q", self.map, 8 * FIELDS.index(name))[0])

    def set(self, **values: int) -> None:
        """Set these, and nothing else."""
        reads = self.get("reads")
        for name in FIELDS[1:]:
            value = values.get(name, 0)
            if name in ("fail_from", "stick_from") and value:
                value += reads
            struct.pack_into("<q", self.map, 8 * FIELDS.index(name), value)


def model_in(folder: Path, **options: Any) -> Path:
    """Copy a model to a folder, all of it on the disk."""
    path = folder / "model.gguf"
    shutil.copyfile(cached_model(**{"arch": "olmoe", "quant": "Q4_K"} | options), path)
    with path.open("rb+") as file:
        os.fsync(file)
    return path


def load(path: Path, device: str = "", *, threads: int = 1, embedding: bool = False, **options: Any) -> hotmoe.Llama:
    """Load quietly; `options` are those of the cache, none for a resident model."""
    if device and not hotmoe.sim.loaded():
        hotmoe.sim.load(1, mib=512)
    cache = (
        hotmoe.ExpertCache(**({"store": "stream", "host_slots": 5, "slots": 6 if device else "auto"} | options))
        if options
        else None
    )
    return hotmoe.Llama(
        path,
        expert_cache=cache,
        cpu_moe=True if cache or not device else None,
        n_gpu_layers=-1 if device else 0,
        devices=device,
        use_mmap=False,
        n_ctx=N_CTX,
        n_ubatch=N_UBATCH,
        n_threads=threads,
        n_threads_batch=threads,
        embedding=embedding,
        logits_all=True,
        verbose=False,
    )


def logits_of(llm: hotmoe.Llama, tokens: Sequence[int]) -> Logits:
    """Evaluate a fresh sequence: a prompt in one ubatch, and 8 tokens one by one. Return all logits."""
    llm.reset()
    llm.eval(tokens)
    for token in NEXT:
        llm.eval([token])
    return np.array(llm.scores[: llm.n_tokens])


def expected(path: Path, device: str = "", threads: int = 1) -> Logits:
    with load(path, device, threads=threads) as llm:
        return logits_of(llm, PROMPT)


def error_of(call: Callable[[], Any], path: Path) -> str:
    """Return the StoreError's message, which must say what was read."""
    try:
        call()
    except StoreError as error:
        message = str(error)
        for part in (str(path), "offset", "blk.", "_exps.weight expert"):
            assert part in message, message
        return message
    raise AssertionError("no StoreError")


def failing_reads(folder: Path, device: str, direct: str, threads: int = 1) -> None:
    """EIO at any moment of prompt and decode: an error, and the next evaluation is exact."""
    path, faults = model_in(folder), Faults()
    right = expected(path, device, threads)
    with load(path, device, threads=threads, direct=direct) as llm:
        assert llm.expert_cache is not None
        assert equal_bits(logits_of(llm, PROMPT), right)
        n_errors = 0
        for code, first in (
            (errno.EIO, 1),
            (errno.EIO, 2),
            (errno.EINVAL, 3),
            (errno.EIO, 5),
            (errno.EIO, 20),
            (errno.EIO, 60),
            (errno.EIO, 150),
        ):
            llm.expert_cache.clear()
            faults.set(fail_from=first, fail_count=10_000, fail_errno=code)
            message = error_of(lambda: logits_of(llm, PROMPT), path)
            assert os.strerror(code) in message, message
            assert "not in the context" in message, message
            n_errors += 1
            faults.set()
            assert equal_bits(logits_of(llm, PROMPT), right), f"after an error at read {first}"
        # between two tokens of a sequence that goes on
        llm.reset()
        llm.eval(PROMPT)
        for i, token in enumerate(NEXT):
            llm.expert_cache.clear()
            faults.set(fail_from=2, fail_count=10_000, fail_errno=errno.EIO)
            error_of(lambda token=token: llm.eval([token]), path)  # type: ignore[misc]
            n_errors += 1
            assert llm.n_tokens == len(PROMPT) + i
            faults.set()
            llm.eval([token])
        assert equal_bits(np.array(llm.scores[: llm.n_tokens]), right)
        store = llm.expert_cache.stats().store
        assert store is not None
        assert store.errors >= n_errors
        print(f"{n_errors} errors")


def told_once(folder: Path, device: str) -> None:
    """An error is that of the evaluation that failed, and of no other, whether it was asked for or not."""
    path, faults = model_in(folder), Faults()
    right = expected(path, device)
    with load(path, device, direct="auto") as llm:
        assert llm.expert_cache is not None

        def fails(call: Callable[[], Any], error: type[Exception]) -> None:
            llm.expert_cache.clear()
            faults.set(fail_from=9, fail_count=10_000, fail_errno=errno.EIO)
            try:
                call()
            except Exception as found:
                assert type(found) is error, repr(found)
            else:
                raise AssertionError("nothing failed")
            finally:
                faults.set()

        def is_no_store_error() -> None:
            """For instance when it is aborted."""
            always = llama_cpp.ggml_abort_callback(lambda _: True)
            llama_cpp.llama_set_abort_callback(llm._ctx.ctx, always, None)
            try:
                llm.eval(PROMPT)
            except DecodeError:
                pass
            else:
                raise AssertionError("not aborted")
            finally:
                llama_cpp.llama_set_abort_callback(llm._ctx.ctx, llama_cpp.ggml_abort_callback(), None)

        assert equal_bits(logits_of(llm, PROMPT), right)
        llm.reset()
        fails(lambda: llm.eval(PROMPT), StoreError)
        assert not llm.expert_cache._take_store_error()
        llm.reset()
        is_no_store_error()
        # below the class: nobody asks why
        llm._ctx.kv_cache_clear()
        llm._batch.set_batch(batch=PROMPT, n_past=0, logits_all=True)
        fails(lambda: llm._ctx.decode(llm._batch), RuntimeError)
        llm._ctx.kv_cache_clear()
        llm.reset()
        is_no_store_error()
        llm.reset()
        assert equal_bits(logits_of(llm, PROMPT), right)
        assert not llm.expert_cache._take_store_error()


def failing_embeddings(folder: Path, device: str) -> None:
    """Embeddings are evaluated by the base class, and fail as everything else does."""
    path, faults = model_in(folder), Faults()
    text = "the quick brown fox jumps over the lazy dog"
    with load(path, device, embedding=True) as llm:
        right = llm.embed(text)
    with load(path, device, embedding=True, direct="auto") as llm:
        assert llm.expert_cache is not None
        assert llm.embed(text) == right
        for first in (1, 30):
            llm.expert_cache.clear()
            faults.set(fail_from=first, fail_count=10_000, fail_errno=errno.EIO)
            error_of(lambda: llm.embed(text), path)
            faults.set()
            assert not llm.expert_cache._take_store_error()
            assert llm.embed(text) == right


def odd_reads(folder: Path, device: str, direct: str) -> None:
    """A passing EIO, short reads, and a slow disk: no error, no other token."""
    path, faults = model_in(folder), Faults()
    right = expected(path, device)
    for values in (
        {"fail_from": 7, "fail_count": 1, "fail_errno": errno.EIO},
        {"fail_from": 7, "fail_count": 1, "fail_errno": errno.EINTR},
        {"longest": 1000},
        {"longest": 4096},
        {"longest": 20_000},
        {"delay_us": 3000},
    ):
        with load(path, device, direct=direct) as llm:
            assert llm.expert_cache is not None
            before = faults.get("reads")
            faults.set(**values)
            assert equal_bits(logits_of(llm, PROMPT), right), values
            store = llm.expert_cache.stats().store
            assert store is not None
            assert store.errors == 0
            assert faults.get("reads") - before >= store.bytes // values.get("longest", 1 << 30), values
            if values.get("fail_errno") == errno.EIO:
                assert store.retries > 0
            if "delay_us" in values:
                assert store.read_ns > 3_000_000 * 100
            faults.set()


def stuck_reader(folder: Path, device: str) -> None:
    """One read does not come back: an error after the time limit, and the context says what it can do then."""
    path, faults = model_in(folder), Faults()
    right = expected(path, device)
    with load(path, device, direct="auto") as llm:
        assert llm.expert_cache is not None
        faults.set(stick_from=4)
        begin = time.monotonic()
        message = error_of(lambda: logits_of(llm, PROMPT), path)
        took = time.monotonic() - begin
        assert 25 < took < 45, took
        assert "stuck" in message, message
        try:
            assert equal_bits(logits_of(llm, PROMPT), right)
            print("usable")
        except StoreError as error:
            assert "load the model again" in str(error), error
            print("says that it is not usable")
        faults.set(release=1)
        time.sleep(0.1)
    with load(path, device, direct="auto") as llm:
        assert equal_bits(logits_of(llm, PROMPT), right)


def changed_file(folder: Path, device: str, how: str) -> None:
    """The file is cut off, overwritten, or replaced while it is in use: an error that says so, and no wrong token."""
    path = model_in(folder)
    other = Path(shutil.copyfile(cached_model(arch="olmoe", quant="Q4_K", seed=1), folder / "other"))
    right = expected(path, device)
    says = {"truncated": "truncated", "written to": "written to", "replaced": "replaced", "unlinked": ""}[how]
    with load(path, device, direct="auto") as llm:
        assert llm.expert_cache is not None
        llm.eval(PROMPT)
        if how == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        elif how == "written to":
            data = other.read_bytes()
            assert len(data) == path.stat().st_size
            with path.open("r+b") as file:
                file.write(data)
        elif how == "replaced":
            other.replace(path)
        else:
            path.unlink()
        if not says:  # the bytes are still there
            assert equal_bits(logits_of(llm, PROMPT), right)
            return
        for _ in range(3):
            assert says in error_of(lambda: logits_of(llm, PROMPT), path)
    if how != "truncated":
        with load(path, device, direct="auto") as llm:
            assert not equal_bits(logits_of(llm, PROMPT), right)


def file_system_without_direct_reads(folder: Path, device: str) -> None:
    """tmpfs: read through the page cache, with a warning; an error if that is not allowed (CASE 28)."""
    path = model_in(folder)
    right = expected(path, device)
    for direct in ("auto", "off"):
        with load(path, device, direct=direct) as llm:
            assert llm.expert_cache is not None
            assert equal_bits(logits_of(llm, PROMPT), right)
            store = llm.expert_cache.stats().store
            assert store is not None
            assert store.direct_bytes == 0
            assert store.buffered_bytes >= store.bytes > 0
            assert (str(path) in store.warning and "refused" in store.warning) == (direct == "auto"), store.warning
    try:
        load(path, device, direct="on")
    except StoreError as error:
        message = str(error)
    assert str(path) in message
    assert "direct" in message
    assert "another file system" in message
