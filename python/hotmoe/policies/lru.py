"""Least recently used."""

from __future__ import annotations

from itertools import islice
from typing import Any

from .base import EvictionPolicy, Experts, Hits


class Lru(EvictionPolicy):
    """Least recently used: evicts the expert whose last use is the oldest.

    Experts of one event count as used in the order in which the event lists them.

    A dict keeps the order in which keys were put in, and ids out of `tolist` are plain numbers: for the few experts of an event
    that takes less time than any call of numpy. Who goes is forgotten, so that the search for the next ones stays short.
    """

    wants_weights = False

    def __init__(self) -> None:
        """Make a policy without state; `setup` makes it for each layer."""
        self.order: dict[int, dict[int, None]] = {}  # layer -> experts, the one used longest ago first

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.order[layer] = {}

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Move the experts to the end."""
        order = self.order[layer]
        for expert in experts.tolist():
            order.pop(expert, None)
            order[expert] = None

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates that were used longest ago."""
        order, among = self.order[layer], set(candidates.tolist())
        victims = list(islice(filter(among.__contains__, order), n))
        for expert in victims:
            del order[expert]
        if len(victims) < n:  # the state of another time was loaded, and does not know them
            victims += sorted(among.difference(victims))[: n - len(victims)]
        return victims

    def reset(self) -> None:
        """Forget all uses."""
        for order in self.order.values():
            order.clear()
