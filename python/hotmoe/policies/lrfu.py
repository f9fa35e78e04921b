"""Least recently and frequently used."""

from __future__ import annotations

import math
from typing import Any

from ._tools import StepClock, at_least
from .base import EvictionPolicy, Experts, Hits


class Lrfu(EvictionPolicy):
    """Recency and frequency in one: every use has a weight that halves each `half_life`; the smallest sum goes.

    Uses count whether the expert was resident or not. Ties go to the least recently used.

    All sums shrink at the same pace, so their order does not change between uses. With a sum as of some time, the key
    log2(sum) + time / half_life ranks the same as the sum would at any later time, and nothing has to be aged to compare.

    Source: Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies",
    IEEE Transactions on Computers 2001.
    """

    wants_weights = False

    def __init__(self, half_life: float = 16.0) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            half_life: In ubatches of the layer, at decode tokens. A short one makes it LRU, a long one LFU.
        """
        self.half_life = at_least(1e-3, "half_life", half_life)
        self.time = StepClock()
        self.clock = 0
        self.sum: dict[int, list[float]] = {}  # layer -> [n_expert] as of the last use
        self.used_in: dict[int, list[int]] = {}  # layer -> [n_expert] time of the last use
        self.rank: dict[int, list[tuple[float, int]]] = {}  # layer -> [n_expert] key, clock of the last use

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.sum[layer] = [0.0] * n_expert
        self.used_in[layer] = [0] * n_expert
        self.rank[layer] = [(0.0, 0)] * n_expert

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Add the uses."""
        now = self.time.tick(layer, kw["step"])
        total, used_in, rank = self.sum[layer], self.used_in[layer], self.rank[layer]
        for expert in experts.tolist():
            self.clock += 1
            total[expert] = total[expert] * 2.0 ** (-(now - used_in[expert]) / self.half_life) + 1.0
            used_in[expert] = now
            rank[expert] = (math.log2(total[expert]) + now / self.half_life, self.clock)

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates with the smallest sums."""
        return sorted(candidates.tolist(), key=self.rank[layer].__getitem__)[:n]

    def reset(self) -> None:
        """Forget all uses."""
        self.time.reset()
        for layer, total in self.sum.items():
            self.setup(layer, len(total), 0)
