"""The pool changes nothing but where experts lie: bit-equality against the fully offloaded run.

A cell is one (quantisation, layout, strict mode, ubatch, state). In every cell the same tokens run twice on the simulated
device with the same ubatch sizes: once with all weights on the device, once with the experts in host memory and a pool.
All logits must agree bit for bit, and every cell asserts that its state really came about, so that none is vacuous:

    cold       first run of a pool with a slot for every expert: misses, no eviction
    evictions  the smallest pool that the ubatch may use: evictions
    all hits   the second run of the same tokens: hits only, nothing uploaded
    rebuilt    the context throws its graphs away between any two ubatches: more graphs than one

Device memory is poisoned with NaN patterns when it is allocated, and modes 1 and 2 run queued work as late, or in as
random an order, as the API allows: a copy that nothing waits for shows as wrong logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import hotmoe
from tests.harness import ALL, Logits, Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model

QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16")
LAYOUTS: dict[str, dict[str, Any]] = {
    "separate": {"arch": "olmoe"},
    "fused": {"arch": "deepseek2", "layout": "fused"},
    "biases": {"arch": "gpt-oss"},
    "scales": {"arch": "qwen3moe", "scales": True},
}
UBATCHES = (1, 3, 8)
STATES = ("cold", "evictions", "all hits", "rebuilt")
N_TOKENS = 40


@dataclass
class Pair:
    """One model, loaded with all weights on the device and again with its experts in host memory."""

    tokens: list[int]
    expected: dict[int, Logits]  # by ubatch
    hosted: Runner
    n_expert: int
    n_used: int


@pytest.fixture(scope="module", params=[(q, layout) for layout in LAYOUTS for q in QUANTS], ids="-".join)
def pair(request: pytest.FixtureRequest, sim: Any) -> Iterator[Pair]:
    quant, layout = request.param
    path = cached_model(quant=quant, **LAYOUTS[layout])
    hotmoe.sim.set_strict(0)
    with Runner(path) as offloaded, Runner(path, cpu_moe=ALL) as hosted, Pool(hosted, 40) as pool:
        tokens = tokens_for(N_TOKENS, hosted.n_vocab)
        expected = {ubatch: offloaded.run(tokens, ubatch) for ubatch in UBATCHES}
        n_expert, n_used = pool.bank(0).n_expert, pool.bank(0).n_expert_used
        pool.close()
        yield Pair(tokens, expected, hosted, n_expert, n_used)


def check_cell(pair: Pair, ubatch: int, state: str) -> str:
    """Run one cell; return what is wrong, or ""."""
    smallest = min(pair.n_expert, pair.n_used * ubatch)
    slots = smallest if state in {"evictions", "rebuilt"} else pair.n_expert
    with Pool(pair.hosted, slots) as pool:
        if state == "all hits":
            pair.hosted.run(pair.tokens, ubatch)
            pool.reset_stats()
        logits = pair.hosted.run(pair.tokens, ubatch, rebuild=state == "rebuilt")
        got = pool.stats()
        steps = pool.steps()
        wrong = []
        if not equal_bits(logits, pair.expected[ubatch]):
            wrong.append("logits differ")
        if pool.wrong_slots():
            wrong.append("a slot does not hold its expert")
        if got.events == 0 or got.hits + got.misses == 0:
            wrong.append("the pool saw nothing")
        if any(got.bypassed):
            wrong.append(f"bypassed: {got.bypassed}")
        implied = {
            "cold": got.misses > 0 and got.evictions == 0,
            "evictions": got.evictions > 0 and got.misses > 0,
            "all hits": got.misses == 0 and got.hits > 0 and got.uploads == 0,
            "rebuilt": steps.graphs_built > 1 and steps.graphs_built == steps.steps,
        }
        if not implied[state]:
            wrong.append(f"the state did not come about: {got}, {steps.graphs_built} graphs in {steps.steps} steps")
        return "; ".join(wrong)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_cells(pair: Pair, mode: int, cell_count: list[int], sim: Any) -> None:
    hotmoe.sim.set_strict(mode, 7)
    sim.reset_counters(0)
    failed = {}
    for ubatch in UBATCHES:
        for state in STATES:
            wrong = check_cell(pair, ubatch, state)
            cell_count[0] += 1
            if wrong:
                failed[ubatch, state] = wrong
    hotmoe.sim.set_strict(0)
    counters = sim.counters(0)
    assert counters.n_kernels > 0, "nothing ran on the simulated device"
    assert (counters.n_deferred > 0) == (mode > 0), "the strict mode had no effect"
    assert counters.n_failed == 0
    assert counters.n_dup_ids == 0
    assert not failed
