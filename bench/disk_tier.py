"""Models larger than memory: stock llama.cpp and the tiers of the expert cache, under one memory limit.

Method
- The model is synthetic (`bench.synthetic`): a real shape, random weights, and routing that follows a recorded trace (--trace) or
  a stated skew (--zipf, --locality). Tokens 0, 1, 2, ... replay it, for every arm the same.
- The routing decides the figures. The default skew hits like recorded traces do (the table in `bench._routing`). A more local
  one, such as --locality 0.9, lets any cache hit, the page cache included: stock mmap with MADV_RANDOM gains most from it.
- A limit is a memory cgroup in which anonymous memory and page cache count, swap is off. Each run of an arm is a process of its
  own in a fresh group, which it enters after its imports and before it loads the model. Pages count for the group that reads them
  first, so the model's files are dropped from the page cache before each run; that they are gone is checked and reported
  (`cached_share_before`). No other process may use the file meanwhile.
- Arms take turns, A B C A B C ..., and medians of the repetitions are reported; raw rows are kept in the JSON. An arm that cannot
  run, or does not fit, is a row with `error`.
- Each run: load; a prompt of --prompt tokens in ubatches of --ubatch; decode until warm (--warm tokens, or --warm-seconds); then
  --decode tokens, or --seconds, count. Prefill is cold, except for what the load left in the page cache: stock mmap reads the
  whole file there.
- `bytes_read_per_token` is read_bytes of /proc/self/io, which sees page faults and O_DIRECT alike. `hit_rate` is the cache's own
  count; for stock arms it is the share of the experts' bytes that were not read (`hit_rate_of` says which). `psi_*_s` is the
  stall time of the whole machine (of the group with cgroup v2), major faults and CPU time are the process's.
- `plan_host_bytes` is what the cache's plan said that the process takes of host memory (`ExpertCache.plan.host_bytes`), mapped
  weights apart. `peak_rss_over_plan` is by how much the resident set grew at most since before the model was loaded, as a part of
  that, and of the mapped weights (`plan_mapped_bytes`) where there are any. It holds what the plan leaves out: pages of the
  libraries, metadata and what the allocator keeps, some MiB, which show with small models.
- The disk's own limit is measured in the same run: random O_DIRECT reads as large as one matrix of one expert, by fio where it is
  installed, else by threads. `all_miss_tokens_per_second` is what it allows if every expert of every token is read;
  `prefill_tokens_per_second` if each expert that a ubatch of the prompt touches is read once; `share_of_disk` is how much of it
  an arm reads.
- Kernel read-ahead (`machine.read_ahead_kib`) decides what mmap arms read: with 8 MiB, a fault drags in the neighbours of an
  expert, and stock mmap can read the whole file for each token.
- No arm repacks weights for the CPU: repacked weights are copies in anonymous memory, so stock llama.cpp with its defaults is
  killed under these limits where the type is repacked (Q4_K, Q4_0). What giving up repacking costs is not measured here.
- "resident, no limit" is the speed with all weights in memory, outside of any group.

Needs Linux and root. From the root of the repository, with the package installed:

    python -m bench.disk_tier [--limits 65,45] [--repetitions 3] [--json] [-o OUT.json] [--plot OUT.png]
    python -m bench.disk_tier --quick --json          # under a minute, a small model, one limit, one repetition
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._disk import cached_share, drop_from_cache, measure_disk
from ._disk_arm import ARMS, Job
from ._memory_group import GroupError, MemoryGroup
from ._shapes import SyntheticSpec
from .synthetic import Synthetic, cached_synthetic, hit_rates

RESIDENT, STOCK = "resident, no limit", "stock mmap"
PRODUCT = ("stream direct", "stream buffered", "mapped + readahead + MADV_RANDOM", "mapped + readahead")
"""Which arm the ratio to stock is quoted for: the first one that runs."""

MODEL: dict[str, Any] = {"shape": "olmoe-1b-7b/2", "n_head_kv": 2, "quant": "Q4_K"}
QUICK_MODEL: dict[str, Any] = MODEL | {"n_layer": 4}
_OVERHEAD = 24 << 20  # the library's own, and the kernel's, besides compute buffers

SUMMARY = (
    "tokens_per_second",
    "hit_rate",
    "bytes_read_per_token",
    "store_read_bytes_per_token",
    "major_faults_per_token",
    "psi_io_s",
    "psi_memory_s",
    "store_wait_s",
    "cpu_s",
    "seconds",
    "tokens",
)


def limit_bytes(text: str, file_bytes: int) -> int:
    """Return a limit in bytes.

    Args:
        text: Percent of the file ("45"), or a size ("4GiB", "400MiB").
        file_bytes: Size of the file.

    Raises:
        ValueError: If it is neither.
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if text.strip().endswith(unit):
            return int(float(text.strip().removesuffix(unit)) * size)
    return int(file_bytes * float(text) / 100)


def default_host_slots(model: Synthetic, limit: int, n_ctx: int, n_ubatch: int) -> str:
    """Return as many slots per layer as the limit surely has room for, next to all else; a token's experts at least."""
    spec = model.spec
    compute = (
        n_ubatch * spec.n_expert_used * (spec.n_embd + 3 * spec.n_ff_exp) * 4 * 2
    )  # F32, what the experts' results take, twice
    kv = spec.n_layer * n_ctx * spec.n_head_kv * spec.head_dim * 2 * 2  # keys and values, F16
    room = 0.9 * limit - model.dense_bytes - kv - compute - _OVERHEAD
    return f"{min(spec.n_expert, max(spec.n_expert_used, int(room / (spec.n_layer * spec.expert_bytes))))}s"


def run_arm(job: Job, limit: int | None, *, timeout: float) -> dict[str, Any]:
    """Run an arm once, in a process of its own.

    Args:
        job: What to do; its `procs` is filled in here.
        limit: Of the group, in bytes; None for no group.
        timeout: Seconds after which it is killed.

    Returns:
        What it measured, or `error`.
    """
    files = [Path(file) for file in job.files]
    row: dict[str, Any] = {"arm": job.arm, "limit_bytes": limit}
    if limit is not None and job.arm == "stock --load-mode none":
        size = sum(file.stat().st_size for file in files)
        if size > limit:
            sizes = f"{size / 2**20:.0f} MiB of weights, limit {limit / 2**20:.0f}"
            return row | {"error": f"does not fit: all of the model in anonymous memory: {sizes}"}
    drop_from_cache(files)
    row["cached_share_before"] = cached_share(files)
    if row["cached_share_before"] > 0.02 and limit is not None:
        share = row["cached_share_before"]
        return row | {"error": f"{share:.0%} of the model stay in the page cache, used by another process: they would not count"}
    group = None
    try:
        if limit is not None:
            group = MemoryGroup(f"hotmoe-bench-{os.getpid()}-{time.monotonic_ns()}", limit)
            job = dataclasses.replace(job, procs=str(group.procs))
        command = [sys.executable, "-m", "bench._disk_arm", json.dumps(dataclasses.asdict(job))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return row | {"error": f"not done after {timeout:.0f} s"}
        if group is not None:
            row["group_peak_bytes"] = group.peak_bytes
    finally:
        if group is not None:
            group.close()
    if done.returncode == -9:
        return row | {"error": "killed: it needs more memory than the limit"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return row | {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    return row | json.loads(done.stdout.splitlines()[-1])


def summary(rows: Sequence[dict[str, Any]], disk: float) -> dict[str, Any]:
    """Return the medians over the repetitions of one arm under one limit."""
    good = [row for row in rows if "error" not in row]
    out: dict[str, Any] = {"name": rows[0]["arm"], "repetitions": len(good)}
    if len(good) < len(rows):
        out["error"] = next(row["error"] for row in rows if "error" in row)
    out |= dict.fromkeys(("tokens_per_second", "hit_rate", "bytes_read_per_token"))
    if not good:
        return out
    for name in SUMMARY:
        values = [row["decode"][name] for row in good if row["decode"].get(name) is not None]
        if values:
            out[name] = statistics.median(values)
    out["tokens_per_second_all"] = [row["decode"]["tokens_per_second"] for row in good]
    out["hit_rate_of"] = good[0]["decode"].get("hit_rate_of")
    out["prefill_tokens_per_second"] = statistics.median(row["prefill"]["tokens_per_second"] for row in good)
    out["prefill_bytes_read"] = statistics.median(row["prefill"]["read_bytes"] for row in good)
    for name in (
        "load_s",
        "peak_rss_bytes",
        "plan_host_bytes",
        "plan_mapped_bytes",
        "peak_rss_over_plan",
        "group_peak_bytes",
        "cached_share_before",
    ):
        values = [row[name] for row in good if row.get(name) is not None]
        out[name] = statistics.median(values) if values else None
    if out["tokens_per_second"] is not None:
        out["share_of_disk"] = out["bytes_read_per_token"] * out["tokens_per_second"] / disk
    return out


def compare(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Add each arm's ratio to stock mmap, and return the product's."""
    speed = {arm["name"]: arm["tokens_per_second"] for arm in arms}
    for arm in arms:
        for key, base in (("ratio_to_stock_mmap", STOCK), ("ratio_to_resident", RESIDENT)):
            if arm["tokens_per_second"] and speed.get(base):
                arm[key] = arm["tokens_per_second"] / speed[base]
    product = next((arm for name in PRODUCT for arm in arms if arm["name"] == name and arm["tokens_per_second"]), {})
    return {"product": product.get("name"), "ratio_to_stock_mmap": product.get("ratio_to_stock_mmap")}


def measure(model: Synthetic, args: argparse.Namespace) -> dict[str, Any]:
    """Run all arms under all limits, and return the report."""
    spec = model.spec
    n_ctx = args.prompt + args.warm + args.decode + 8
    sizes = sorted((limit_bytes(text, model.n_bytes) for text in args.limits.split(",")), reverse=True)
    limits = {round(size / model.n_bytes, 4): size for size in sizes}
    disk = measure_disk(max(model.files, key=lambda f: f.stat().st_size), spec.expert_bytes // 3, seconds=args.disk_seconds)
    rows: list[dict[str, Any]] = []
    for repetition in range(args.repetitions):
        for fraction, limit in limits.items():
            for arm in args.arms:
                if arm == RESIDENT and limit != sizes[0]:
                    continue
                job = Job(
                    arm=arm,
                    files=tuple(str(file) for file in model.files),
                    n_vocab=model.routing.n_tokens,
                    used_bytes=spec.used_bytes_per_token,
                    procs="",
                    n_prompt=args.prompt,
                    n_warm=args.warm,
                    n_decode=args.decode,
                    warm_seconds=args.warm_seconds,
                    decode_seconds=args.seconds,
                    n_threads=args.threads,
                    n_ubatch=args.ubatch,
                    host_slots=args.host_slots or default_host_slots(model, limit, n_ctx, args.ubatch),
                    io_threads=args.io_threads,
                )
                start = time.monotonic()
                row = run_arm(job, None if arm == RESIDENT else limit, timeout=args.timeout)
                row |= {"wall_s": time.monotonic() - start, "load_average": os.getloadavg()[0]}
                rows.append(row | {"limit_fraction": fraction, "repetition": repetition, "host_slots": job.host_slots})
                _progress(rows[-1])
    results = []
    for fraction, limit in limits.items():
        mine = [row for row in rows if row["limit_fraction"] == fraction or row["arm"] == RESIDENT]
        arms = [summary([row for row in mine if row["arm"] == arm], disk["bytes_per_second"]) for arm in args.arms]
        result = {"limit_fraction": fraction, "limit_bytes": limit, "host_slots": args.host_slots or ""} | compare(arms)
        result["host_slots"] = result["host_slots"] or default_host_slots(model, limit, n_ctx, args.ubatch)
        results.append(result | {"arms": arms})
    return {
        **results[-1],  # the smallest limit
        "limits": results,
        "disk": disk
        | {
            "all_miss_tokens_per_second": disk["bytes_per_second"] / spec.used_bytes_per_token,
            "prefill_tokens_per_second": args.prompt * disk["bytes_per_second"] / model.touched_bytes(args.prompt, args.ubatch),
        },
        "model": {
            "file": model.path.name,
            "bytes": model.n_bytes,
            "dense_bytes": model.dense_bytes,
            "expert_bytes": spec.expert_bytes,
            "expert_bytes_per_token": spec.used_bytes_per_token,
            "routing": model.routing.name,
            "lru_hit_rate_by_share": hit_rates(model.routing),
            **dataclasses.asdict(spec),
        },
        "settings": {
            name: getattr(args, name)
            for name in ("prompt", "ubatch", "warm", "decode", "warm_seconds", "seconds", "threads", "io_threads", "repetitions")
        },
        "machine": {
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "read_ahead_kib": _read_ahead(model.path),
        },
        "rows": rows,
    }


def _read_ahead(file: Path) -> int | None:
    """Return the kernel's read-ahead of the disk that holds a file, in KiB."""
    device = file.stat().st_dev
    try:
        return int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())
    except OSError:
        return None


def _progress(row: dict[str, Any]) -> None:
    what = row.get("error") or f"{row['decode']['tokens_per_second'] or 0:.2f} tok/s"
    print(f"{row['limit_fraction']:.0%}, {row['arm']}: {what} ({row['wall_s']:.1f} s)", file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """Return the report as text."""
    model, disk = report["model"], report["disk"]
    lines = [
        f"{model['file']}: {model['bytes'] / 2**20:.0f} MiB, {model['n_layer']} layers x {model['n_expert']} experts, top "
        f"{model['n_expert_used']}, {model['expert_bytes_per_token'] / 2**20:.1f} MiB of experts per token",
        f"routing: {model['routing']}; LRU would hit "
        + ", ".join(f"{rate:.3f} at {share}" for share, rate in model["lru_hit_rate_by_share"].items()),
        f"disk: {disk['bytes_per_second'] / 1e6:.0f} MB/s in reads of {disk['block_bytes'] / 1024:.0f} KiB ({disk['tool']}, "
        + ", ".join(f"{n}: {rate / 1e6:.0f}" for n, rate in disk["by_readers"].items())
        + f"); every access a miss: {disk['all_miss_tokens_per_second']:.2f} tok/s at best; the prompt, each expert read once "
        f"per ubatch: {disk['prefill_tokens_per_second']:.1f} tok/s at best",
    ]
    columns = {"tok/s": 9, "x stock": 9, "hits": 7, "MiB/tok": 9, "of disk": 9, "faults/tok": 12, "prefill": 9, "peak MiB": 10}
    columns |= {"plan MiB": 10, "RSS/plan": 10}
    for result in report["limits"]:
        limit = f"limit {result['limit_bytes'] / 2**20:.0f} MiB, {result['limit_fraction']:.0%} of the file"
        lines += ["", f"{limit}; {result['host_slots']} host slots per layer"]
        lines.append(f"{'arm':34}" + "".join(f"{name:>{width}}" for name, width in columns.items()))
        for arm in result["arms"]:
            if arm["tokens_per_second"] is None:
                lines.append(f"{arm['name']:34}  {arm.get('error', 'no tokens')}")
                continue
            peak = arm.get("group_peak_bytes") or arm["peak_rss_bytes"]
            plan = arm["plan_host_bytes"] / 2**20 if arm.get("plan_host_bytes") is not None else None
            lines.append(
                f"{arm['name']:34}{arm['tokens_per_second']:9.2f}{_number(arm.get('ratio_to_stock_mmap'), '9.1f')}"
                f"{_number(arm['hit_rate'], '7.3f')}{arm['bytes_read_per_token'] / 2**20:9.2f}{arm['share_of_disk']:9.2f}"
                f"{arm['major_faults_per_token']:12.1f}{arm['prefill_tokens_per_second']:9.1f}{peak / 2**20:10.0f}"
                f"{_number(plan, '10.0f')}{_number(arm.get('peak_rss_over_plan'), '10.2f')}"
            )
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else " " * (int(form.split(".")[0]) - 1) + "-"


def plot(report: dict[str, Any], path: str) -> None:
    """Draw the speeds of all arms under all limits."""
    import matplotlib.pyplot as plt  # optional

    figure, axes = plt.subplots(1, len(report["limits"]), sharex=True, sharey=True, squeeze=False, figsize=(11, 4))
    for axis, result in zip(axes[0], report["limits"], strict=True):
        arms = [arm for arm in reversed(result["arms"]) if arm["tokens_per_second"]]
        bars = axis.barh([arm["name"] for arm in arms], [arm["tokens_per_second"] for arm in arms], color="#4878a8")
        axis.bar_label(bars, fmt="%.1f", padding=3)
        bound = axis.axvline(report["disk"]["all_miss_tokens_per_second"], color="#a84848", linestyle=":")
        axis.set(xscale="log", xlabel="decode, tokens per second", title=f"limit {result['limit_fraction']:.0%} of the file")
        axis.legend([bound], ["disk's limit if every access missed"], loc="lower right", fontsize=8)
        axis.margins(x=0.15)
    figure.suptitle(f"{report['model']['file']}, {report['model']['bytes'] / 2**20:.0f} MiB", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.disk_tier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quick = "--quick" in sys.argv
    parser.add_argument("--quick", action="store_true", help="a small model, one limit, one repetition, short runs")
    parser.add_argument(
        "--limits", default="45" if quick else "65,45", help="percent of the file (45), or sizes (4GiB, 400MiB), with commas"
    )
    parser.add_argument("--arms", default="", help=f"some of: {'; '.join(ARMS)} (separated by ;)")
    parser.add_argument("--repetitions", type=int, default=1 if quick else 3)
    parser.add_argument("--prompt", type=int, default=16 if quick else 128, help="tokens")
    parser.add_argument("--ubatch", type=int, default=16 if quick else 128, help="tokens")
    parser.add_argument("--warm", type=int, default=100, help="tokens")
    parser.add_argument("--decode", type=int, default=100, help="tokens that count")
    parser.add_argument("--warm-seconds", type=float, default=1.0 if quick else 15.0)
    parser.add_argument("--seconds", type=float, default=2.0 if quick else 30.0)
    parser.add_argument("--disk-seconds", type=float, default=1.0 if quick else 3.0)
    parser.add_argument("--timeout", type=float, default=60.0 if quick else 600.0, help="seconds per run of an arm")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--io-threads", type=int, default=8)
    parser.add_argument("--host-slots", default="", help="for the arms that take them; default: what the limit has room for")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-o", "--output", help="write the report as JSON")
    parser.add_argument("--plot", help="write a plot (needs matplotlib)")
    for field in dataclasses.fields(SyntheticSpec):  # of the model
        default = (QUICK_MODEL if quick else MODEL).get(field.name, field.default)
        parser.add_argument(
            "--" + field.name.replace("_", "-"), dest="model_" + field.name, type=type(field.default), default=default
        )
    args = parser.parse_args()
    args.arms = [name.strip() for name in args.arms.split(";")] if args.arms else list(ARMS)
    for name in args.arms:
        if name not in ARMS:
            parser.error(f"arm {name!r} is not one of {'; '.join(ARMS)}")
    return args


def main() -> None:
    """Run the command."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the group of the arm at work is removed
    try:
        MemoryGroup(f"hotmoe-bench-{os.getpid()}-try", 1 << 30).close()
        model = cached_synthetic(
            **{name[len("model_") :]: value for name, value in vars(args).items() if name.startswith("model_")}
        )
    except (GroupError, ValueError) as error:
        sys.exit(f"bench.disk_tier: {error}")
    report = measure(model, args)
    text = json.dumps(report)
    if args.output:
        Path(args.output).write_text(text + "\n")
    print(text if args.json else table(report))
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()
