"""First in, first out."""

from __future__ import annotations

from typing import Any

from .base import EvictionPolicy, Experts


class Fifo(EvictionPolicy):
    """First in, first out: evicts the expert that was loaded longest ago, however often it was used since."""

    wants_weights = False

    def __init__(self) -> None:
        """Make a policy without state; `setup` makes it for each layer."""
        self.queue: dict[int, list[int]] = {}  # layer -> resident experts, in the order in which they were loaded

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.queue[layer] = []

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates that were loaded first."""
        may_go = set(candidates.tolist())
        return [expert for expert in self.queue[layer] if expert in may_go][:n]

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        """Put an expert at the queue's end."""
        self.queue[layer].append(expert)

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        """Take an expert out of the queue."""
        self.queue[layer].remove(expert)

    def reset(self) -> None:
        """Empty the queues."""
        for queue in self.queue.values():
            queue.clear()
