"""Decode speed at depth: does a pool change how decode slows down as the context fills?

One model, two contexts: "off" computes with all experts where they are, "pool" from a pool with fewer slots than experts.
Both are filled with the same tokens to each depth, then decode the same tokens in turn; the median over the repetitions is
taken at each depth. What counts is whether the two curves have the same slope, that is whether the ratio of the arms stays
the same at every depth. Run from the root of the repository, with the package installed:

    python -m bench.depth [--device CPU|SIM0] [--depths 0,4096,16384] [--slots 24] [--repetitions 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import hotmoe
from tests.harness import ALL, Pool, Runner, tokens_for
from tests.models import cached_model

SHAPE: dict[str, Any] = {"arch": "qwen3moe", "quant": "Q8_0", "n_layer": 4, "n_expert": 48, "n_expert_used": 4, "n_ctx": 32768}


def seconds(runner: Runner, tokens: list[int]) -> float:
    """Return the time to decode tokens one by one; the context grows by them."""
    start = time.perf_counter()
    for token in tokens:
        runner.decode([token])
    return time.perf_counter() - start


def fill(runner: Runner, depth: int) -> None:
    """Bring the context to a depth, in ubatches, without asking for logits."""
    while runner.n_past < depth:
        n = min(512, depth - runner.n_past)
        runner.decode(tokens_for(n, runner.n_vocab, seed=runner.n_past), outputs=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU", choices=["CPU", "SIM0"])
    parser.add_argument("--depths", default="0,4096,16384")
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    depths = sorted(int(text) for text in args.depths.split(","))

    if args.device == "SIM0":
        hotmoe.sim.load(1, mib=2048, poison=False)
    common: dict[str, Any] = {
        "devices": () if args.device == "CPU" else ("SIM0",),
        "extra_bufts": False,
        "n_ctx": depths[-1] + 2 * args.tokens * (args.repetitions + 1) * len(depths) + 512,
        "n_ubatch": 512,
    }
    path = cached_model(**SHAPE)
    rows = []
    with Runner(path, **common) as off, Runner(path, cpu_moe=ALL, **common) as hosted, Pool(hosted, args.slots) as pool:
        for depth in depths:
            for runner in (off, hosted):
                fill(runner, depth)
            pairs = []
            for i in range(args.repetitions + 1):
                tokens = tokens_for(args.tokens, off.n_vocab, seed=i)
                first, second = (off, hosted) if i % 2 else (hosted, off)
                times = seconds(first, tokens), seconds(second, tokens)
                pairs.append(times if i % 2 else times[::-1])
            warm = pairs[1:]
            rows.append(
                {
                    "depth": depth,
                    "off_tokens_per_second": args.tokens / statistics.median(a for a, _ in warm),
                    "pool_tokens_per_second": args.tokens / statistics.median(b for _, b in warm),
                    "ratio_median_of_pairs": statistics.median(a / b for a, b in warm),
                }
            )
        got = pool.stats(phase=0)
        report = {
            "device": args.device,
            "simulated": args.device != "CPU",
            "slots": args.slots,
            "experts": SHAPE["n_expert"],
            "decode_hit_rate": got.hits / max(1, got.hits + got.misses),
            "rows": rows,
        }
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.device}, {args.slots} of {SHAPE['n_expert']} experts in slots, decode hit rate {report['decode_hit_rate']:.3f}")
    for row in rows:
        off_speed, pool_speed = row["off_tokens_per_second"], row["pool_tokens_per_second"]
        ratio = row["ratio_median_of_pairs"]
        print(f"depth {row['depth']:6}: off {off_speed:8.1f} tok/s, pool {pool_speed:8.1f}, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
