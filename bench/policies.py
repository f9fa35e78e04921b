"""Which policy and which admission: all of them on recorded routing, against LRU and against Belady's optimum.

Traces
- Published: the three in tests/traces, each one prompt of a real model.
- With a prompt in between: two of them, the middle third of their generated tokens taken for a long prompt instead.
- The shipped model, recorded here and now on the beginnings of modules of Python's standard library, its context of 512 tokens
  filled in several ways: long prompts with answers of three lengths, turns, and short prompts with long answers.

Each is replayed at 10, 25 and 50 % of the experts (at least as many slots as a token uses). A cell is one trace at one size; it
counts if LRU evicts there while tokens are generated, since otherwise there is nothing to decide. Compared is the hit rate of
generated tokens, in percentage points above LRU without admission, cell by cell: the mean, the mean over those cells in which
Belady's optimum is at least 5 points above LRU (so that there is something to gain), and the worst cell.

What a prompt does to the pool is not settled, so there are three ways: one event per layer which runs through the pool in waves;
past the pool, as the engine does it with ubatches that may need more experts than there are slots; and token by token, where the
tokens of prompts count like generated ones. An expert that is not admitted has its slot on loan, but in one group, where it gets
none, as with misses that the CPU computes.

`static` is left out: it is no better than the list that it is given. `random` is the mean of its seeds 1 to 3.

    python -m bench.policies [-o bench/policies.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hotmoe
from hotmoe.cli.demo import shipped_model
from hotmoe.policies.registry import ADMISSIONS, POLICIES
from hotmoe.replay import sweep
from hotmoe.traces import DECODE, PREFILL, Trace
from hotmoe.traces.record import record

HERE = Path(__file__).parent
SIZES = ("10%", "25%", "50%")
SEEDS = tuple(f"random(seed={seed})" for seed in (1, 2, 3))
MODULES = ("argparse", "json.decoder", "textwrap", "shutil", "logging", "heapq", "csv", "configparser", "pprint", "sched")

Key = tuple[str, str]  # policy, admission
Cells = dict[tuple[str, str], float]  # (trace, size) -> percentage points above LRU


# ---- traces ----


def with_prompt_in_between(trace: Trace) -> Trace:
    """Return a trace whose middle third of generated tokens is a prompt, and what follows another turn."""
    mine = trace.rows(np.arange(len(trace)))
    generated = np.unique(mine.token[mine.phase == DECODE])
    begin, end = generated[len(generated) // 3], generated[2 * len(generated) // 3]
    mine.phase[(mine.token >= begin) & (mine.token < end)] = PREFILL
    mine.turn[mine.token >= begin] = 1
    mine.name = f"{trace.name}, middle as a prompt"
    return mine


def token_by_token(trace: Trace) -> Trace:
    """Return a trace whose prompts were generated, as it were."""
    mine = trace.rows(np.arange(len(trace)))
    mine.phase[:] = DECODE
    # of a prompt's last tokens alone the last layer has rows; they stay, since nothing is known of the others
    mine.name = f"{trace.name}, all tokens"
    return mine


def shipped_model_traces() -> list[Trace]:
    """Record the shipped model."""
    model = shipped_model()
    cache = hotmoe.ExpertCache(slots=0, record=True)
    with hotmoe.Llama(model, expert_cache=cache, n_ctx=512, n_gpu_layers=0, verbose=False) as llm:
        texts = [llm.tokenize(_source(name).encode()) for name in MODULES]

        def part(tokens: Sequence[int], begin: int, end: int) -> str:
            return llm.detokenize(list(tokens[begin:end])).decode(errors="ignore")

        kinds: dict[str, tuple[list[Any], int]] = {
            "prompts of 384, answers of 16": ([part(t, 0, 384) for t in texts], 16),
            "prompts of 384, answers of 96": ([part(t, 0, 384) for t in texts], 96),
            "4 turns of 64, answers of 48": ([[part(t, 64 * i, 64 * i + 64) for i in range(4)] for t in texts], 48),
            "prompts of 16, answers of 400": ([part(t, 0, 16) for t in texts], 400),
        }
        traces = []
        for name, (prompts, n_tokens) in kinds.items():
            traces.append(record(llm, prompts, n_tokens=n_tokens, temp=0.7, seed=1))
            traces[-1].name = f"{model.stem}, {name}"
    return traces


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


# ---- comparison ----


def compare(traces: Iterable[Trace], **options: str) -> tuple[dict[Key, Cells], dict[str, dict[str, dict[str, float]]]]:
    """Replay everything.

    Returns:
        (points above LRU by policy and admission, for the cells that count; hit rates in percent of all cells, trace -> size ->
        name of the policy, LRU and the bounds alone).
    """
    policies = [name for name in POLICIES.native() if name not in ("static", "random")]
    above: dict[Key, Cells] = defaultdict(dict)
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for trace in traces:
        for size in SIZES:
            lru, *bounds = sweep([trace], ["lru", "belady", "belady-bypass"], ["always"], slots=[size], **options)
            rows = rates.setdefault(trace.name, {}).setdefault(size, {})
            rows |= {result.policy: 100 * (result.hit_rate or 0) for result in (lru, *bounds)}
            rows["evictions"] = lru.decode.evictions or 0
            if not lru.decode.evictions:
                continue
            cell = (trace.name, size)
            seeds = defaultdict(list)
            for result in sweep([trace], [*policies, *SEEDS], list(ADMISSIONS.native()), slots=[size], **options):
                points = 100 * ((result.hit_rate or 0) - (lru.hit_rate or 0))
                if result.policy in SEEDS:
                    seeds[result.admission].append(points)
                else:
                    above[result.policy, result.admission][cell] = points
            for admission, points_of_seeds in seeds.items():
                above["random", admission][cell] = statistics.mean(points_of_seeds)
            bound = "belady-bypass" if options.get("miss") == "cpu" else "belady"
            above["belady", ""][cell] = rows[bound] - rows["lru"]
    return above, rates


def with_room(above: dict[Key, Cells]) -> set[tuple[str, str]]:
    """Return the cells in which there is something to gain."""
    return {cell for cell, points in above["belady", ""].items() if points >= 5}


def mean(cells: Cells, among: set[tuple[str, str]] | None = None) -> float:
    return statistics.mean(points for cell, points in cells.items() if among is None or cell in among)


def summary(above: dict[Key, Cells]) -> list[str]:
    """Return a table of all policies, the best on average first."""
    room = with_room(above)
    lines = ["| policy | admission | mean | where there is room | worst cell | which |", "|---|---|---:|---:|---:|---|"]
    for (policy, admission), cells in sorted(above.items(), key=lambda item: -mean(item[1])):
        where, worst = min(cells.items(), key=lambda item: item[1])
        name = "*Belady's optimum*" if policy == "belady" else policy
        figures = f"{mean(cells):+.2f} | {mean(cells, room):+.2f} | {worst:+.2f}"
        lines.append(f"| {name} | {admission} | {figures} | {where[0]}, {where[1]} |")
    return lines


def overview(results: dict[str, dict[Key, Cells]]) -> list[str]:
    """Return a table with a row for each group of traces: what the best wins, and what the candidates of others do."""
    shown = [("slru", "always"), ("slru", "second-miss"), ("lfru", "always"), ("lrfu", "always")]
    head = " | ".join(policy if admission == "always" else f"{policy} + {admission}" for policy, admission in shown)
    lines = [
        f"| traces | cells | {head} | best | Belady |",
        "|---|---:|" + "---:|" * len(shown) + "---|---:|",
    ]
    for title, above in results.items():
        figures = " | ".join(f"{mean(above[key]):+.2f} ({min(above[key].values()):+.2f})" for key in shown)
        winner = best(above)
        name = winner[0] if winner[1] == "always" else " + ".join(winner)
        belady = above["belady", ""]
        lines.append(f"| {title} | {len(belady)} | {figures} | {name} {mean(above[winner]):+.2f} | {mean(belady):+.2f} |")
    return lines


def cells_of(rates: dict[str, dict[str, dict[str, float]]], above: dict[Key, Cells], shown: Sequence[Key]) -> list[str]:
    """Return a table of all cells: LRU, some others, and the bounds, in percent."""
    names = [f"{policy} + {admission}" if admission != "always" else policy for policy, admission in shown]
    lines = [
        f"| trace | slots | lru | {' | '.join(names)} | Belady | Belady, misses left out |",
        "|---|---:|" + "---:|" * (3 + len(names)),
    ]
    for trace, sizes in rates.items():
        for size, row in sizes.items():
            others = [above[key].get((trace, size)) for key in shown]
            figures = [f"{row['lru']:.1f}" + ("" if row["evictions"] else " (no evictions)")]
            figures += ["-" if points is None else f"{row['lru'] + points:.1f}" for points in others]
            figures += [f"{row[bound]:.1f}" for bound in ("belady", "belady-bypass")]
            lines.append(f"| {trace} | {size} | {' | '.join(figures)} |")
    return lines


def best(above: dict[Key, Cells]) -> Key:
    return max((key for key in above if key[0] != "belady"), key=lambda key: mean(above[key]))


def report(
    groups: Sequence[tuple[str, list[Trace], dict[str, str]]], progress: Callable[[str], Any]
) -> tuple[str, dict[str, Any]]:
    """Return the page, and the raw figures."""
    results: dict[str, dict[Key, Cells]] = {}
    details: list[str] = []
    raw: dict[str, Any] = {}
    for title, traces, options in groups:
        progress(title)
        above, rates = compare(traces, **options)
        results[title] = above
        shown = list(
            dict.fromkeys([best(above), ("lfru", "always"), ("lrfu", "always"), ("slru", "always"), ("slru", "second-miss")])
        )
        details += ["", f"## {title}", "", *summary(above), "", "Hit rates, %:", "", *cells_of(rates, above, shown)]
        raw[title] = {
            "points_above_lru": [
                {"policy": key[0], "admission": key[1], "trace": cell[0], "slots": cell[1], "points": points}
                for key, cells in above.items()
                for cell, points in cells.items()
            ],
            "hit_rates_percent": rates,
        }
    lines = [
        "# Policies and admissions on recorded routing",
        "",
        f"Made by `python -m bench.policies` (hotmoe {hotmoe.__version__}, Python {platform.python_version()}); the method is",
        "described in `bench/policies.py`. Figures are percentage points of the hit rate of generated tokens above LRU without",
        "admission: the mean over all cells (one trace at one size) in which LRU evicts, in parentheses the worst cell.",
        "",
        *overview(results),
    ]
    return "\n".join([*lines, *details]) + "\n", raw


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=HERE / "policies.md")
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    args = parser.parse_args()

    published = [Trace.load(path) for path in sorted((HERE.parent / "tests" / "traces").glob("*.csv"))]
    for trace in published:
        trace.name = Path(trace.name).stem
    real = [with_prompt_in_between(trace) for trace in published if trace.n_tokens(DECODE) > 100]
    print("recording", file=sys.stderr)
    recorded = shipped_model_traces()
    groups = [
        ("Published traces", published, {}),
        ("Published traces, misses that are not admitted get no slot", published, {"miss": "cpu"}),
        ("Published traces with a long prompt in between", real, {}),
        ("The shipped model, prompts in waves through the pool", recorded, {}),
        ("The shipped model, prompts past the pool", recorded, {"large": "bypass"}),
        ("The shipped model, prompts token by token", [token_by_token(trace) for trace in recorded], {}),
    ]
    text, raw = report(groups, lambda title: print(title, file=sys.stderr))
    args.output.write_text(text, encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
