"""Frequency over age."""

from __future__ import annotations

from typing import Any

from ._tools import StepClock, at_least
from .base import EvictionPolicy, Experts, Hits


class Lfru(EvictionPolicy):
    """Frequency over age: evicts the expert with the smallest count / (age + grace).

    The age is the time since the last use. The count grows by one with every use, after what it was has been halved for each
    `half_life` since the use before; it is kept for experts that are not resident, too. Ties go to the least recently used.
    """

    wants_weights = False

    def __init__(self, half_life: float = 32.0, grace: float = 8.0) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            half_life: Ubatches of the layer, at decode tokens, in which a count halves.
            grace: What is added to the age, in the same unit, so that the first few tokens without a use matter little.
        """
        self.half_life = at_least(1e-3, "half_life", half_life)
        self.grace = at_least(1e-3, "grace", grace)
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

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Count the uses."""
        now = self.time.tick(layer, kw["step"])
        count, used_in, used = self.count[layer], self.used_in[layer], self.used[layer]
        for expert in experts.tolist():
            self.clock += 1
            count[expert] = count[expert] * 2.0 ** (-(now - used_in[expert]) / self.half_life) + 1.0
            used_in[expert] = now
            used[expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates with the smallest ratio."""
        now = self.time.now[layer]
        count, used_in, used = self.count[layer], self.used_in[layer], self.used[layer]
        return sorted(candidates.tolist(), key=lambda e: (count[e] / (now - used_in[e] + self.grace), used[e]))[:n]

    def reset(self) -> None:
        """Forget all uses."""
        self.time.reset()
        for layer, count in self.count.items():
            self.setup(layer, len(count), 0)
