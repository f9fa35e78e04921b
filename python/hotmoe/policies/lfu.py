"""Least frequently used, with decay."""

from __future__ import annotations

from typing import Any

from ._tools import StepClock, at_least
from .base import EvictionPolicy, Experts, Hits


class Lfu(EvictionPolicy):
    """Least frequently used, with decay: evicts the expert with the lowest count of uses, each worth less as time passes.

    Counts are kept for experts that are not resident, too, so that a returning expert is judged by its history. Ties go to the
    least recently used.
    """

    wants_weights = False

    def __init__(self, half_life: float = 64.0) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            half_life: Ubatches of the layer, at decode tokens, in which a count halves.
        """
        self.half_life = at_least(1e-3, "half_life", half_life)
        self.time = StepClock()
        self.clock = 0
        self.count: dict[int, list[float]] = {}  # layer -> [n_expert] as of the last use
        self.used_in: dict[int, list[int]] = {}  # layer -> [n_expert] time of the last use
        self.used: dict[int, list[int]] = {}  # layer -> [n_expert] clock of the last use

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.count[layer] = [0.0] * n_expert
        self.used_in[layer] = [0] * n_expert
        self.used[layer] = [0] * n_expert

    def aged_count(self, layer: int, expert: int, now: int) -> float:
        """Return the count as it is now."""
        weight: float = 2.0 ** (-(now - self.used_in[layer][expert]) / self.half_life)
        return self.count[layer][expert] * weight

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Count the uses."""
        now = self.time.tick(layer, kw["step"])
        for expert in experts.tolist():
            self.clock += 1
            self.count[layer][expert] = self.aged_count(layer, expert, now) + 1.0
            self.used_in[layer][expert] = now
            self.used[layer][expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates with the lowest counts."""
        now, used = self.time.now[layer], self.used[layer]
        return sorted(candidates.tolist(), key=lambda e: (self.aged_count(layer, e, now), used[e]))[:n]

    def reset(self) -> None:
        """Forget all counts."""
        self.time.reset()
        for layer, count in self.count.items():
            self.setup(layer, len(count), 0)
