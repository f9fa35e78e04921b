"""Least recently used."""

from __future__ import annotations

from typing import Any

from .base import EvictionPolicy, Experts, Hits


class Lru(EvictionPolicy):
    """Least recently used: evicts the expert whose last use is the oldest.

    Experts of one event count as used in the order in which the event lists them.

    Plain lists, since one expert at a time is looked at: indexing a numpy array takes several times as long, and for the few
    experts of an event one call of numpy takes longer than the loop.
    """

    wants_weights = False

    def __init__(self) -> None:
        """Make a policy without state; `setup` makes it for each layer."""
        self.clock = 0
        self.used: dict[int, list[int]] = {}  # layer -> [n_expert] clock of the last use, 0 = never

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.used[layer] = [0] * n_expert

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Note when each expert was used."""
        used, clock = self.used[layer], self.clock
        for expert in experts.tolist():
            clock += 1
            used[expert] = clock
        self.clock = clock

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates that were used longest ago."""
        return sorted(candidates.tolist(), key=self.used[layer].__getitem__)[:n]

    def reset(self) -> None:
        """Forget all uses."""
        for used in self.used.values():
            used[:] = [0] * len(used)
