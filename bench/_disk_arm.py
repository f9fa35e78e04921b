"""One arm of `bench.disk_tier` in a process of its own: ``python -m bench._disk_arm JSON`` prints a line of JSON.

The process imports everything, then enters the memory cgroup, then loads the model: the interpreter, about 70 MiB, does not count
against the limit, all that the model takes does. Then it evaluates a prompt, decodes until it is warm, and decodes what counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotmoe import ExpertCache, Llama

from ._disk import advise_mappings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What an arm is to do.

    Attributes:
        arm: A row of `ARMS`.
        files: The model's, the first one to load.
        n_vocab: Tokens with prescribed routing: the replay begins again after them.
        used_bytes: Of the experts that one token uses.
        procs: The file through which to enter the cgroup; "" for no limit.
        n_prompt: Tokens of the prompt.
        n_warm: Tokens to decode before it counts.
        n_decode: Tokens that count.
        warm_seconds: End of the warm-up, at the latest.
        decode_seconds: End of what counts, at the latest.
        n_threads: Of the computation.
        n_ubatch: Tokens per ubatch of the prompt.
        host_slots: For the arms that bound host memory.
        io_threads: Of the stream store.
    """

    arm: str
    files: tuple[str, ...]
    n_vocab: int
    used_bytes: int
    procs: str
    n_prompt: int
    n_warm: int
    n_decode: int
    warm_seconds: float
    decode_seconds: float
    n_threads: int
    n_ubatch: int
    host_slots: str
    io_threads: int


class _Unrepacked(Llama):
    """A model whose weights stay in the file's layout: repacked ones are copies in anonymous memory, not a mapping."""

    @property
    def model_params(self) -> Any:
        return Llama.model_params.fget(self)  # type: ignore[attr-defined]

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.use_extra_bufts = False
        Llama.model_params.fset(self, params)  # type: ignore[attr-defined]


def _readahead(job: Job) -> ExpertCache:
    return ExpertCache(slots=0, tier_manager="readahead", host_slots=job.host_slots)


def _stream(job: Job, direct: str) -> ExpertCache:
    wish: dict[str, Any] = {"store": "stream", "host_slots": job.host_slots, "io_threads": job.io_threads, "direct": direct}
    return ExpertCache(**wish)


# name -> whether to map the file, and the cache
ARMS: dict[str, Any] = {
    "resident, no limit": (False, None),
    "stock mmap": (True, None),
    "stock mmap + MADV_RANDOM": (True, None),
    "stock --load-mode none": (False, None),
    "mapped + readahead": (True, _readahead),
    "mapped + readahead + MADV_RANDOM": (True, _readahead),
    "stream buffered": (True, lambda job: _stream(job, "off")),
    "stream direct": (True, lambda job: _stream(job, "on")),
}


def run(job: Job) -> dict[str, Any]:
    """Do it, and return what was measured."""
    if job.procs:
        Path(job.procs).write_text(str(os.getpid()))
    mmap, make_cache = ARMS[job.arm]
    cache = make_cache(job) if make_cache else None
    n_ctx = job.n_prompt + job.n_warm + job.n_decode + 8
    rss_before = _status("VmRSS")
    start = time.perf_counter()
    llm = _Unrepacked(
        job.files[0],
        n_gpu_layers=0,
        use_mmap=mmap,
        n_ctx=n_ctx,
        n_batch=job.n_ubatch,
        n_ubatch=job.n_ubatch,
        n_threads=job.n_threads,
        n_threads_batch=job.n_threads,
        verbose=False,
        expert_cache=cache,
    )
    out: dict[str, Any] = {"load_s": time.perf_counter() - start}
    if "MADV_RANDOM" in job.arm:
        out["advised_bytes"] = advise_mappings([Path(file) for file in job.files])
        if not out["advised_bytes"]:
            raise RuntimeError("no mapping of the model was found: nothing to advise")
    with llm:
        position = 0

        def decode(n: int, seconds: float) -> int:
            nonlocal position
            end, first = time.perf_counter() + seconds, position
            while position < first + n and (time.perf_counter() < end or position < first + 2):
                llm.eval([position % job.n_vocab])
                position += 1
            return position - first

        with _measured(cache) as prefill:
            prompt = [i % job.n_vocab for i in range(job.n_prompt)]
            llm.eval(prompt)
            position = prefill["tokens"] = len(prompt)
        out["warm_tokens"] = decode(job.n_warm, job.warm_seconds)
        with _measured(cache) as measured:
            measured["tokens"] = decode(job.n_decode, job.decode_seconds)
        out |= {"prefill": _rates(prefill), "decode": _rates(measured)}
        _hit_rate(out["decode"], cache, job)
    out |= {"peak_rss_bytes": _status("VmHWM"), "rss_before_bytes": rss_before}
    if cache is not None:
        host = cache.plan.host
        out |= {"plan_host_bytes": host.total_bytes, "plan_mapped_bytes": host.mapped_bytes}
        # pages of a mapped file are in the resident set, too
        out["peak_rss_over_plan"] = (out["peak_rss_bytes"] - rss_before) / (host.total_bytes + host.mapped_bytes)
    return out


@contextlib.contextmanager
def _measured(cache: ExpertCache | None) -> Iterator[dict[str, Any]]:
    """Collect what a block takes. The block sets `tokens`."""
    if cache is not None:
        cache.reset_stats()
    before, start = _sample(), time.perf_counter()
    out: dict[str, Any] = {}
    yield out
    out["seconds"] = time.perf_counter() - start
    out |= {key: value - before[key] for key, value in _sample().items()}
    out["anonymous_bytes"] = _status("RssAnon")
    if cache is not None:
        stats = cache.stats().as_dict()
        for phase in ("total", "prefill", "decode"):
            stats[phase].pop("layers", None)
        out["cache"] = stats


def _sample() -> dict[str, float]:
    """Return counters that only grow. Pressure (`psi_*`) is that of the whole machine, or of a cgroup of version 2."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    out: dict[str, float] = {"major_faults": usage.ru_majflt, "cpu_s": usage.ru_utime + usage.ru_stime}
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    out["read_bytes"] = int(io["read_bytes"])
    group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    for what in ("io", "memory"):
        for file in (group / f"{what}.pressure", Path("/proc/pressure") / what):
            with contextlib.suppress(OSError, IndexError, ValueError):
                out[f"psi_{what}_s"] = int(file.read_text().splitlines()[0].rpartition("total=")[2]) / 1e6
                break
    return out


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _rates(measured: dict[str, Any]) -> dict[str, Any]:
    n = measured["tokens"]
    rates = {
        "tokens_per_second": n / measured["seconds"] if n else None,
        "bytes_read_per_token": measured["read_bytes"] / n if n else None,
        "major_faults_per_token": measured["major_faults"] / n if n else None,
    }
    return measured | rates


def _hit_rate(decode: dict[str, Any], cache: ExpertCache | None, job: Job) -> None:
    """Add `hit_rate`, and of what: experts that the cache counted, or bytes of experts that were not read from the disk."""
    stats = decode.get("cache") or {}
    tier, counted = stats.get("tier"), (stats.get("decode") or {}).get("hit_rate")
    store = stats.get("store") or {}
    if store:
        decode["store_read_bytes_per_token"] = store["disk_bytes"] / max(1, decode["tokens"])
        decode["store_wait_s"] = store["wait_ns"] / 1e9
    if counted is not None:
        decode["hit_rate"], decode["hit_rate_of"] = counted, "experts, by the cache"
    elif tier and tier["used"]:
        decode["hit_rate"], decode["hit_rate_of"] = 1 - tier["entered"] / tier["used"], "experts, by the tier manager's count"
    elif decode["tokens"]:
        # what is read besides experts, or twice, counts as missed experts: a lower bound
        decode["hit_rate"] = max(0.0, 1 - decode["bytes_read_per_token"] / job.used_bytes)
        decode["hit_rate_of"] = "bytes"


def main() -> None:
    job = json.loads(sys.argv[1])
    print(json.dumps(run(Job(**job | {"files": tuple(job["files"])}))))


if __name__ == "__main__":
    main()
