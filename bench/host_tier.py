"""What should host memory keep of the experts that the device has? Reads from the file, on recorded routing.

The kinds of host memory that are compared are told in bench/_two_tiers.py. An event that needs more experts than the device
has slots runs in waves, those that are there first.

Traces: the three in tests/traces, each one prompt of a real model, and the shipped model, recorded here and now with long
and with short prompts (bench/policies.py). A cell is one trace at one share of the experts on the device and one in host
memory. It counts if `apart` with `lru` reads a tenth more experts for generated tokens than have never been used before,
which must be read whatever is kept. Compared are reads for generated tokens, as percent of those of `apart` with `lru`, cell
by cell. In the tables with numbers of experts, `one tier` has the slots of both tiers, as has Belady's optimum.

    python -m bench.host_tier [-o bench/host_tier.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hotmoe
from bench._slot_maps import slots_of
from bench._two_tiers import KINDS, POLICIES, Result, run
from bench.policies import shipped_model_traces
from hotmoe.replay import replay
from hotmoe.traces import Trace
from hotmoe.traces.events import Events

HERE = Path(__file__).parent
DEVICE, HOST = (0.1, 0.25, 0.5), (0.25, 0.5, 0.75)

CONCLUSION = """
- What hits on the device must not count as a use in host memory ({inclusive} reads with `lfru`): it would keep what
  nobody asks it for.
- Nor should what the device has go first ({demoted}). Where the device has few slots, its experts come and go, and all
  reads pass through the few places in host memory whose experts are on the device just now, while the other copies grow
  old.
- A copy whose expert loses its slot on the device has just become useful. To count that as a use costs nothing and
  saves reads with every policy that looks at uses: with `lfru`, {apart} becomes {released} (worst cell {worst}). That is
  what the engine does.
- `lfru` and `lrfu` are the best policies here as they are on the device; they differ by less than the traces do, so the
  default is the same, `lfru`. Admissions win nothing.
- Exclusive tiers would read much less ({exclusive}): together they are as good as one tier of both sizes. But for each
  read that they save beyond `released`, {price} experts are copied back from the device, or {price_back} if only those
  are of which there is no copy ({written_back} reads). Whether that pays depends on the disk and the bus: such a copy
  takes the bus's other direction, but must have left its slot before the next upload arrives there. That is for
  a real GPU to say; until then the engine copies nothing back.
"""


class Cell(NamedTuple):
    """A trace, and which shares of the experts have slots on the device and in host memory."""

    trace: str
    device: float
    host: float

    def __str__(self) -> str:
        """Return it as it stands in tables."""
        return f"{self.trace}, {self.device:.0%} / {self.host:.0%}"


Key = tuple[str, str]  # kind, policy


class Study(NamedTuple):
    """What came of some traces.

    Attributes:
        results: Kind and policy -> cell -> result.
        bounds: Cell -> experts read per generated token by one tier of both tiers' slots, by the same with Belady's optimum, and
            the first uses alone.
        counting: Cells that count.
    """

    results: dict[Key, dict[Cell, Result]]
    bounds: dict[Cell, tuple[float, float, float]]
    counting: list[Cell]

    def percent(self, key: Key) -> dict[Cell, float]:
        """Return how many more reads than `apart` with `lru`, in percent, for the cells that count."""
        base = self.results["apart", "lru"]
        return {cell: 100 * (self.results[key][cell].reads / base[cell].reads - 1) for cell in self.counting}


def study(traces: Sequence[Trace], keys: Sequence[Key], **options: Any) -> Study:
    """Run all kinds and policies on all cells."""
    results: dict[Key, dict[Cell, Result]] = {key: {} for key in keys}
    bounds = {}
    for trace in traces:
        events = Events.of(trace)
        per_token = 1 / events.n_decode_tokens

        def misses(policy: str, slots: int, trace: Trace = trace, per_token: float = per_token) -> float:
            return replay(trace, policy, slots=slots).decode.misses * per_token

        for device in DEVICE:
            for host in HOST:
                cell = Cell(trace.name, device, host)
                n_device, n_host = slots_of(trace, device), slots_of(trace, host)
                for kind, policy in keys:
                    results[kind, policy][cell] = run(trace, events, n_device, n_host, kind, policy, **options)
                n = min(n_device[0] + n_host[0], trace.banks[0].n_expert)
                bounds[cell] = misses("lfru", n), misses("belady", n), misses("unlimited", n)
    counting = [cell for cell, reads in results["apart", "lru"].items() if reads.reads > 1.1 * bounds[cell][2]]
    return Study(results, bounds, counting)


# ---- report ----


def summary(found: Study) -> list[str]:
    lines = [
        "| host memory keeps | policy | mean | worst cell | which | best cell | copies back per upload |",
        "|---|---|---:|---:|---|---:|---:|",
    ]
    rows = {key: found.percent(key) for key in found.results}
    for key, cells in sorted(rows.items(), key=lambda row: statistics.mean(row[1].values())):
        where = max(cells, key=cells.__getitem__)
        copies = statistics.mean(found.results[key][cell].copies / found.results[key][cell].uploads for cell in cells)
        figures = f"{statistics.mean(cells.values()):+.1f} % | {cells[where]:+.1f} % | {where} | {min(cells.values()):+.1f} %"
        lines.append(f"| {key[0]} | {key[1]} | {figures} | {f'{copies:.2f}' if copies else 'none'} |")
    return lines


def details(studies: Sequence[Study]) -> list[str]:
    shown = [("apart", "lru"), *((kind, "lfru") for kind in KINDS)]
    names = " | ".join(f"{kind}, {policy}" for kind, policy in shown)
    lines = [
        f"| trace | device / host | uploads | {names} | one tier | Belady | first uses |",
        "|---|---:|---:|" + "---:|" * (3 + len(shown)),
    ]
    for found in studies:
        for cell, bounds in found.bounds.items():
            results = [found.results[key][cell] for key in shown]
            figures = [f"{r.reads:.1f}" + (f" ({r.copies:.0f} back)" if r.copies else "") for r in results]
            figures += [f"{bound:.1f}" for bound in bounds]
            shares = f"{cell.device:.0%} / {cell.host:.0%}" + ("" if cell in found.counting else " (does not count)")
            lines.append(f"| {cell.trace} | {shares} | {results[0].uploads:.1f} | {' | '.join(figures)} |")
    return lines


def admissions(traces: Sequence[Trace], kind: str, policy: str) -> list[str]:
    """Return a table of admissions to host memory, against `always`."""
    lines = ["| admission | mean | worst cell | best cell |", "|---|---:|---:|---:|"]
    names = ("always", "second-miss", "ghost")
    reads: dict[str, list[float]] = {name: [] for name in names}
    for trace in traces:
        events = Events.of(trace)
        for device in DEVICE:
            for host in HOST:
                sizes = slots_of(trace, device), slots_of(trace, host)
                for name in names:
                    reads[name].append(run(trace, events, *sizes, kind, policy, admission=name).reads)
    for name in names[1:]:
        percent = [100 * (a / b - 1) for a, b in zip(reads[name], reads["always"], strict=True)]
        lines.append(f"| {name} | {statistics.mean(percent):+.1f} % | {max(percent):+.1f} % | {min(percent):+.1f} % |")
    return lines


def conclusion(found: Study) -> str:
    ours = found.results["released", "lfru"]

    def mean(kind: str) -> str:
        return f"{statistics.mean(found.percent((kind, 'lfru')).values()):+.1f} %"

    def price(kind: str) -> str:
        theirs = found.results[kind, "lfru"]
        saved = sum(ours[cell].reads - theirs[cell].reads for cell in found.counting)
        return f"{sum(theirs[cell].copies for cell in found.counting) / saved:.1f}"

    means = {kind.replace(" ", "_"): mean(kind) for kind in KINDS}
    worst = f"{max(found.percent(('released', 'lfru')).values()):+.1f} %"
    return CONCLUSION.format(**means, worst=worst, price=price("exclusive"), price_back=price("written back")).strip()


def report() -> tuple[str, dict[str, Any]]:
    """Return the page, and the raw figures."""
    published = [Trace.load(path) for path in sorted((HERE.parent / "tests" / "traces").glob("*.csv"))]
    for trace in published:
        trace.name = Path(trace.name).stem
    print("recording", file=sys.stderr)
    recorded = [trace for trace in shipped_model_traces() if "answers of 96" in trace.name or "answers of 400" in trace.name]
    every = [(kind, policy) for kind in KINDS for policy in POLICIES]
    some = [(kind, policy) for kind in KINDS for policy in ("lru", "lfru")]
    groups: dict[str, tuple[list[Trace], list[Key], dict[str, str]]] = {
        "Published traces": (published, every, {}),
        "Published traces, `lru` on the device": (published, some, {"device_policy": "lru"}),
        "The shipped model": (recorded, some, {}),
    }
    studies = {}
    for title, (traces, keys, options) in groups.items():
        print(title, file=sys.stderr)
        studies[title] = study(traces, keys, **options)

    lines = [
        "# What host memory keeps of the experts that the device has",
        "",
        f"Made by `python -m bench.host_tier` (hotmoe {hotmoe.__version__}, Python {platform.python_version()}); the method is",
        "described in `bench/host_tier.py`, the kinds of host memory in `bench/_two_tiers.py`. Percentages are of experts read",
        "from the file for generated tokens, against `apart` with `lru`: the mean of all cells that count, the worst, the best.",
        "The device evicts by `lfru` unless a title says otherwise. All this is counted, nothing is timed.",
        "",
        conclusion(studies["Published traces"]),
    ]
    for title, found in studies.items():
        lines += ["", f"## {title}", "", f"{len(found.counting)} of {len(found.bounds)} cells count.", "", *summary(found)]
    lines += [
        "",
        "## Admission to host memory",
        "",
        "`released` with `lfru`, against `always`, all cells of the published traces:",
        "",
    ]
    lines += admissions(published, "released", "lfru")
    lines += ["", "## Experts read per generated token, of all layers together", ""]
    lines += details([studies["Published traces"], studies["The shipped model"]])
    raw = {
        title: [
            {"kind": kind, "policy": policy, **cell._asdict(), **result._asdict(), "counts": cell in found.counting}
            for (kind, policy), cells in found.results.items()
            for cell, result in cells.items()
        ]
        for title, found in studies.items()
    }
    return "\n".join(lines) + "\n", raw


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host_tier", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=HERE / "host_tier.md")
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    args = parser.parse_args()
    text, raw = report()
    args.output.write_text(text, encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
