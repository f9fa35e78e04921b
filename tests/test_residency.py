"""Experts are resident by layer (CASE 8): expert 3 of one layer says nothing about expert 3 of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotmoe.replay import replay
from hotmoe.traces import Trace
from hotmoe.traces.trace import TraceBank
from tests.harness import ALL, Pool, Runner, tokens_for
from tests.policy_sides import ReplayedPools

N_LAYER, N_EXPERT = 3, 8


def same_in_all_layers(n_tokens: int) -> Trace:
    """Return routing in which every layer uses the same two experts for every token."""
    n = n_tokens * N_LAYER
    return Trace(
        experts=np.tile(np.array([[5, 2]], np.int32), (n, 1)),
        layer=np.tile(np.arange(N_LAYER, dtype=np.int32), n_tokens),
        token=np.repeat(np.arange(n_tokens, dtype=np.int32), N_LAYER),
        phase=np.zeros(n, np.uint8),
        banks=tuple(TraceBank(layer, 0, N_EXPERT) for layer in range(N_LAYER)),
        name="same",
    )


def test_replay_loads_an_expert_in_each_layer() -> None:
    for scope in ("layer", "global"):
        result = replay(same_in_all_layers(4), "lru", slots=6, scope=scope)
        assert (result.decode.misses, result.decode.hits) == (2 * N_LAYER, 3 * 2 * N_LAYER), scope


def test_losing_a_slot_in_one_layer_leaves_the_others() -> None:
    pools = ReplayedPools(N_EXPERT, 2, "lru", layers=(0, 1))
    pools.feed([(0, 1, [5, 2]), (1, 1, [5, 2]), (0, 2, [3, 4])])
    assert [sorted(pools.slots(pool)) for pool in (0, 1)] == [[3, 4], [2, 5]]
    fed = pools.feed([(0, 3, [5]), (1, 3, [5])])
    assert fed is not None
    assert fed[0] == [0, 1]
    pools.close()


def test_the_engine_loads_an_expert_in_each_layer(sim: Any, tiny_model: Path) -> None:
    """With a slot for every expert, each layer misses exactly the experts that it uses itself, and holds its own bytes."""
    with Runner(tiny_model, cpu_moe=ALL) as runner, Pool(runner, 40) as pool:
        seen = [0] * pool.n_banks
        shared = 0  # experts that are new to a layer, and resident in another
        for token in tokens_for(12, runner.n_vocab):
            before = [set(pool.slot_map(bank)) - {-1} for bank in range(pool.n_banks)]
            runner.decode([token])
            for bank in range(pool.n_banks):
                loaded = set(pool.slot_map(bank)) - {-1} - before[bank]
                seen[bank] += len(loaded)
                shared += len(loaded & before[1 - bank])
        assert [pool.stats(bank).misses for bank in range(pool.n_banks)] == seen
        assert [pool.stats(bank).uploads for bank in range(pool.n_banks)] == [3 * n for n in seen], "gate, up and down of each"
        assert all(pool.stats(bank).hits > 0 for bank in range(pool.n_banks))
        assert pool.wrong_slots() == []
        assert shared > 5, "or the test shows nothing"
