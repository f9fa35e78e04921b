"""What a policy costs per event, native and in Python.

An event is what one layer needs for one token, here 8 of 128 experts. Two measurements:

"slot map": recorded or synthetic decode events of 48 layers through the engine's slot maps alone (hotmoe.replay). The time is
that of everything which happens at an event, but copies: the slot map's own work, the policy's, and for Python the way there and
back. `us per event` is the median of several repetitions; all arms take turns.

"engine": a generated model decodes tokens with the native LRU and with its twin in Python, which decides the same, in turn. The
difference of the hook's time per event is what Python adds; 48 of them are what a token of a 48-layer model waits. Once alone,
where the median token counts, so that what else the machine does is left out; once (the mean) while a second Python thread
computes, which holds the interpreter's lock for up to sys.getswitchinterval() at a time; and once more with a shorter interval.

    python -m bench.policy_cost [--trace FILE] [--tokens 100] [--slots 64] [--repetitions 7] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import hotmoe
from hotmoe import ExpertCache, Llama, policies
from hotmoe.replay import replay
from hotmoe.traces import Trace
from hotmoe.traces.trace import TraceBank
from tests.models import cached_model

N_LAYER, N_EXPERT, N_USED = 48, 128, 8
SHORT_INTERVAL_S = 1e-4
NATIVE = ("lru", "slru", "lfu", "fifo", "lfru", "lrfu", "s3fifo", "least-stale", "random")
TWINS = (policies.Lru, policies.Slru, policies.Lfu, policies.Fifo, policies.Lfru, policies.Lrfu, policies.S3Fifo)

# the engine's arm: small matrices, so that the hook is not lost in the noise of the rest
SHAPE = {"arch": "qwen3moe", "quant": "Q8_0", "n_layer": 8, "n_expert": N_EXPERT, "n_expert_used": N_USED}


def synthetic_trace(n_tokens: int) -> Trace:
    """Return routing with a skew: expert number k of a layer's own order is drawn about as often as 1 / k."""
    rng = np.random.default_rng(0)
    share = 1.0 / np.arange(1, N_EXPERT + 1)
    order = [rng.permutation(N_EXPERT) for _ in range(N_LAYER)]
    rows = [
        order[layer][rng.choice(N_EXPERT, N_USED, replace=False, p=share / share.sum())]
        for _ in range(n_tokens)
        for layer in range(N_LAYER)
    ]
    n = len(rows)
    return Trace(
        experts=np.array(rows, np.int32),
        layer=np.tile(np.arange(N_LAYER, dtype=np.int32), n_tokens),
        token=np.repeat(np.arange(n_tokens, dtype=np.int32), N_LAYER),
        phase=np.zeros(n, np.uint8),
        banks=tuple(TraceBank(layer, 0, N_EXPERT) for layer in range(N_LAYER)),
        name="synthetic",
    )


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Let a second Python thread compute during the block."""
    stop = threading.Event()

    def compute() -> None:
        x = 0
        while not stop.is_set():
            x += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def slot_map_arms(trace: Trace, repetitions: int) -> list[dict[str, Any]]:
    """Measure all policies on a trace, in turn."""
    arms: list[tuple[str, Any]] = [(name, name) for name in NATIVE] + [(f"{twin.__name__} (Python)", twin) for twin in TWINS]
    times: dict[str, list[float]] = {name: [] for name, _ in arms}
    hits = {}
    for _ in range(repetitions):
        for name, policy in arms:
            result = replay(trace, policy, slots="50%")
            times[name].append(result.seconds / len(trace) * 1e6)
            hits[name] = result.hit_rate
    return [{"policy": name, "us_per_event": statistics.median(times[name]), "hit_rate": hits[name]} for name, _ in arms]


def engine_arms(repetitions: int, n_tokens: int, slots: int) -> dict[str, Any]:
    """Measure the hook with the native LRU and with its twin, alone and beside a busy thread."""
    hotmoe.sim.load(1, mib=1024, poison=False)
    path = cached_model(**SHAPE)
    llms = {
        name: Llama(path, expert_cache=ExpertCache(slots=slots, policy=policy), n_ctx=512, n_threads=1, verbose=False)
        for name, policy in (("native", "lru"), ("python", policies.Lru))
    }

    hit_rate = 0.0

    def hook_us(name: str) -> list[float]:
        """Return the hook's time per event, for each token."""
        nonlocal hit_rate
        llm = llms[name]
        assert llm.expert_cache is not None
        llm.reset()
        llm.eval([300])
        llm.expert_cache.reset_stats()
        times = [0]
        for token in range(301, 301 + n_tokens):
            llm.eval([token])
            times.append(llm.expert_cache.stats().decode.hook_ns)
        decode = llm.expert_cache.stats().decode
        assert decode.events == n_tokens * SHAPE["n_layer"]
        assert decode.policy_fallbacks == 0
        hit_rate = decode.hit_rate or 0.0
        return (np.diff(times) / SHAPE["n_layer"] / 1000).tolist()

    def added(average: Callable[[list[float]], float], n: int) -> float:
        pairs = [(hook_us("native"), hook_us("python")) for _ in range(n)]
        return statistics.median(average(python) - average(native) for native, python in pairs)

    alone = added(statistics.median, repetitions)
    interval = sys.getswitchinterval()
    n_busy = min(repetitions, 3)  # some hundred times slower
    with busy_thread():
        busy = added(statistics.mean, n_busy)
        sys.setswitchinterval(SHORT_INTERVAL_S)
        try:
            less_busy = added(statistics.mean, n_busy)
        finally:
            sys.setswitchinterval(interval)
    out = {
        "hit_rate": hit_rate,
        "us_added_per_event": alone,
        "us_added_per_event_busy": busy,
        "us_added_per_event_busy_short_interval": less_busy,
        "ms_added_per_token_of_48_layers": alone * N_LAYER / 1000,
        "ms_added_per_token_of_48_layers_busy": busy * N_LAYER / 1000,
        "ms_added_per_token_of_48_layers_busy_short_interval": less_busy * N_LAYER / 1000,
        "switch_interval_ms": interval * 1000,
        "short_interval_ms": SHORT_INTERVAL_S * 1000,
    }
    for llm in llms.values():
        llm.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a trace with 8 experts per token; default: synthetic, 1/k skew")
    parser.add_argument("--tokens", type=int, default=100, help="of the synthetic trace, and of each repetition in the engine")
    parser.add_argument("--slots", type=int, default=64, help=f"of {N_EXPERT} experts in the engine: decides about the hit rate")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    trace = Trace.load(args.trace) if args.trace else synthetic_trace(args.tokens)
    report = {
        "trace": trace.name,
        "slot_map": slot_map_arms(trace, args.repetitions),
        "engine": engine_arms(args.repetitions, args.tokens, args.slots),
    }
    if args.json:
        print(json.dumps(report))
        return
    for arm in report["slot_map"]:
        print(f"{arm['policy']:24} {arm['us_per_event']:8.2f} us per event   hit rate {arm['hit_rate']:.3f}")
    print("in the engine, the twin of LRU in Python against the native one:")
    for key, value in report["engine"].items():
        print(f"{key:52} {value:8.3f}")


if __name__ == "__main__":
    main()
