"""What the pool costs when every access is a hit.

Two arms decode the same tokens of the same model in turn, A B B A A B ...: "resident" runs stock llama.cpp with all experts
where they are computed; "pool" runs with a slot for every expert, after a run that loaded them all. Both compute the same
bytes with the same kernels, so the ratio of their times is the cost of the id remap, the extra splits and the hook.

On the CPU both arms leave the experts unrepacked (use_extra_bufts = false), since a pool needs the file's own layout, and the
resident arm loads without mmap: the page cache may hold a file in huge pages, which alone is worth several percent. Where
the pages of either arm happen to lie differs from process to process by as much, so quote the median of several runs. On
the simulated device (--device SIM0) the ratio includes what the simulator spends per graph and copy, and says nothing about
a GPU. Run it from the root of the repository, with the package installed:

    python -m bench.overhead [--device CPU|SIM0] [--model FILE] [--tokens 64] [--repetitions 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import hotmoe
from tests.harness import ALL, Pool, Runner, tokens_for
from tests.models import cached_model

# qwen3moe at a quarter of the width of a 30B-A3B: large enough that a token takes milliseconds, small enough to write in seconds
SHAPE = {"arch": "qwen3moe", "quant": "Q8_0", "n_layer": 8, "n_expert": 48, "n_expert_used": 8, "n_embd": 512, "n_ff_exp": 512}


def seconds(runner: Runner, tokens: list[int]) -> float:
    """Return the time to decode tokens one by one."""
    runner.reset()
    start = time.perf_counter()
    for token in tokens:
        runner.decode([token])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU", choices=["CPU", "SIM0"])
    parser.add_argument("--model", type=Path, help="a GGUF file; default: a generated qwen3moe model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    if args.device == "SIM0":
        hotmoe.sim.load(1, mib=4096, poison=False)
    path = args.model or cached_model(**SHAPE)
    devices = () if args.device == "CPU" else ("SIM0",)
    common = {"devices": devices, "extra_bufts": False, "n_threads": args.threads, "n_ctx": args.tokens + 32}
    with (
        Runner(path, mmap=False, **common) as resident,
        Runner(path, cpu_moe=ALL, **common) as hosted,
        Pool(hosted, 9999) as pool,
    ):
        tokens = tokens_for(args.tokens, resident.n_vocab)
        for runner in (resident, hosted, resident, hosted):
            seconds(runner, tokens)
        pool.reset_stats()
        pairs = []
        for i in range(args.repetitions):
            first, second = (resident, hosted) if i % 2 == 0 else (hosted, resident)
            times = seconds(first, tokens), seconds(second, tokens)
            pairs.append(times if i % 2 == 0 else times[::-1])
        got = pool.stats()
        assert got.misses == 0, "an arm whose accesses are not all hits is no arm"
        assert got.events == args.repetitions * args.tokens * pool.n_banks
        report = {
            "device": args.device,
            "simulated": args.device != "CPU",
            "model": Path(path).name,
            "layers": pool.n_banks,
            "slots": sorted({pool.bank(i).n_slots for i in range(pool.n_banks)}),
            "pool_bytes": sum(pool.bank(i).pool_bytes for i in range(pool.n_banks)),
            "policy": "lru",
            "threads": args.threads,
            "tokens": args.tokens,
            "repetitions": args.repetitions,
            "resident_tokens_per_second": args.tokens / statistics.median(a for a, _ in pairs),
            "pool_tokens_per_second": args.tokens / statistics.median(b for _, b in pairs),
            "ratio_median_of_pairs": statistics.median(a / b for a, b in pairs),
            "hook_us_per_layer": got.hook_ns / got.events / 1000,
        }
    if args.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:28} {value:.3f}" if isinstance(value, float) else f"{key:28} {value}")


if __name__ == "__main__":
    main()
