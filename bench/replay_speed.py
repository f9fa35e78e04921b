"""How many expert accesses per second a replay gets through, for each policy, on one core.

Two traces: the longest of those in tests/traces, again and again until it has a million accesses, and routing drawn at random,
with a skew as real routers have it: 48 layers of 128 experts, 8 per token. Slots: a quarter of the experts. Counted is what
`hotmoe.replay.replay` spends in the slot maps and policies, the events ready; conversion of rows to events is shown apart.
An arm is repeated, the best time stands. The target is 1 million accesses per second for native policies, 100 thousand for those
in Python.

    python -m bench.replay_speed [--accesses 1000000] [--repetitions 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hotmoe import policies
from hotmoe.policies.registry import POLICIES
from hotmoe.replay import BOUNDS, replay
from hotmoe.traces import DECODE, Events, Trace, TraceBank

TRACES = Path(__file__).parent.parent / "tests" / "traces"
TARGETS = {"native": 1e6, "Python": 1e5, "bound": 1e6}
PYTHON = (policies.Lru, policies.Lfru)


def repeated(trace: Trace, n_accesses: int) -> Trace:
    """Return a trace several times over, each time as a prompt of its own."""
    n = max(1, -(-n_accesses // int(trace.n_used.sum())))
    parts = []
    for i in range(n):
        part = trace.rows(np.arange(len(trace)))
        part.prompt = part.prompt + np.int32(i)
        parts.append(part)
    return Trace.concat(parts)


def random_trace(n_accesses: int, n_layer: int = 48, n_expert: int = 128, n_used: int = 8) -> Trace:
    """Return routing in which the expert of rank r of a layer is drawn with a weight of 1 / r."""
    rng = np.random.default_rng(1)
    n_tokens = max(1, n_accesses // (n_layer * n_used))
    n = n_tokens * n_layer
    # the experts with the smallest of exponential times at their rates: a draw without replacement
    times = rng.exponential(size=(n, n_expert)) * np.arange(1, n_expert + 1)
    return Trace(
        phase=np.full(n, DECODE, dtype=np.uint8),
        token=np.repeat(np.arange(n_tokens), n_layer),
        layer=np.tile(np.arange(n_layer), n_tokens),
        experts=np.argpartition(times, n_used, axis=1)[:, :n_used],
        banks=tuple(TraceBank(layer, 0, n_expert) for layer in range(n_layer)),
        name="random",
    )


def measure(trace: Trace, policy: Any, kind: str, repetitions: int) -> dict[str, Any]:
    """Return a row of the report."""
    runs = [replay(trace, policy, slots="25%") for _ in range(repetitions)]
    n = runs[0].decode.accesses + runs[0].prefill.accesses
    seconds = min(run.seconds for run in runs)
    return {
        "trace": Path(trace.name).stem,
        "policy": runs[0].policy,
        "kind": kind,
        "accesses": n,
        "hit_rate": runs[0].hit_rate,
        "accesses_per_second": n / seconds,
        "meets_target": n / seconds >= TARGETS[kind],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_speed", description=__doc__)
    parser.add_argument(
        "--accesses", type=int, default=1_000_000, help="at least, for native policies; a tenth for those in Python"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    largest = max((Trace.load(path) for path in TRACES.glob("*.csv")), key=len)
    rows: list[dict[str, Any]] = []
    conversion: dict[str, float] = {}
    for make in (lambda n: repeated(largest, n), random_trace):
        trace, short = make(args.accesses), make(args.accesses // 10)
        start = time.perf_counter()
        Events.of(trace)
        conversion[Path(trace.name).stem] = len(trace) / (time.perf_counter() - start)
        rows += [measure(trace, name, "native", args.repetitions) for name in POLICIES.native()]
        rows += [measure(trace, name, "bound", args.repetitions) for name in BOUNDS]
        rows += [measure(short, policy, "Python", args.repetitions) for policy in PYTHON]

    if args.json:
        print(json.dumps({"rows": rows, "rows_to_events_per_second": conversion}, indent=2))
    else:
        for row in rows:
            print(
                f"{row['trace']:20} {row['policy']:14} {row['kind']:7} {row['accesses_per_second'] / 1e6:8.2f} M accesses/s"
                + ("" if row["meets_target"] else "   BELOW THE TARGET")
            )
        for name, per_second in conversion.items():
            print(f"{name:20} rows to events        {per_second / 1e6:8.2f} M rows/s")
    if not all(row["meets_target"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
