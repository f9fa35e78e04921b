"""S3-FIFO: three queues."""

from __future__ import annotations

from typing import Any

from ._tools import at_least
from .base import EvictionPolicy, Experts, Hits

MAX_HITS = 3


class S3Fifo(EvictionPolicy):
    """S3-FIFO: what is used once passes through a small queue and leaves room for the rest.

    A loaded expert enters the small queue; at its end it goes on to the main queue if it was hit meanwhile, else it leaves, and
    its id is remembered in the ghost queue. What is loaded while its id is in there enters the main queue at once. At the end
    of the main queue an expert goes back to the beginning once for each hit, of which up to 3 are counted, then it leaves.

    Experts leave the small queue whenever it holds its share of the slots, otherwise the main queue. Those that may not be
    evicted are passed over and keep their place.

    Source: Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO queues are all you need for cache eviction", SOSP 2023. (There it takes two
    hits to go on to the main queue.)
    """

    wants_weights = False

    def __init__(self, small: float = 0.1) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            small: Share of the slots that the small queue gets, at least one slot.
        """
        self.share = at_least(0, "small", small)
        self.layers: dict[int, _Queues] = {}

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.layers[layer] = _Queues(n_slots, max(1, int(n_slots * self.share)))

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Count the hits."""
        hits = self.layers[layer].hits
        for expert in experts.tolist():
            if expert in hits:
                hits[expert] = min(hits[expert] + 1, MAX_HITS)

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the n candidates that leave the queues first."""
        may_go = set(candidates.tolist())
        victims = []
        for _ in range(n):
            victims.append(self.layers[layer].leave(may_go))
            may_go.remove(victims[-1])
        return victims

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        """Put an expert into the small queue, or the main queue if it is remembered."""
        self.layers[layer].enter(expert)

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        """Take out an expert that lost its slot in another way than by leaving a queue."""
        self.layers[layer].drop(expert)

    def reset(self) -> None:
        """Empty the queues."""
        for layer, queues in self.layers.items():
            self.layers[layer] = _Queues(queues.n_slots, queues.max_small)


class _Queues:
    """The queues of one layer. They begin at the right: experts enter there, and leave at the left."""

    def __init__(self, n_slots: int, max_small: int) -> None:
        self.n_slots = n_slots
        self.max_small = max_small
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.hits: dict[int, int] = {}  # of those in small or main

    def enter(self, expert: int) -> None:
        self.hits[expert] = 0
        if expert in self.ghost:
            self.ghost.remove(expert)
            self.main.append(expert)
        else:
            self.small.append(expert)

    def leave(self, may_go: set[int]) -> int:
        """Take out the next expert that may leave, and return it."""
        queues = [self.leave_main, self.leave_small, self.leave_main]
        if len(self.small) >= self.max_small:
            queues.insert(0, self.leave_small)
        return next(expert for leave in queues if (expert := leave(may_go)) is not None)

    def leave_small(self, may_go: set[int]) -> int | None:
        for expert in [expert for expert in self.small if expert in may_go]:
            self.small.remove(expert)
            if self.hits[expert] == 0:
                del self.hits[expert]
                self.ghost.append(expert)
                del self.ghost[: -max(1, self.n_slots - self.max_small)]
                return expert
            self.hits[expert] = 0
            self.main.append(expert)
        return None

    def leave_main(self, may_go: set[int]) -> int | None:
        while (expert := next((expert for expert in self.main if expert in may_go), None)) is not None:
            self.main.remove(expert)
            if self.hits[expert] == 0:
                del self.hits[expert]
                return expert
            self.hits[expert] -= 1
            self.main.append(expert)
        return None

    def drop(self, expert: int) -> None:
        if expert in self.hits:
            del self.hits[expert]
            (self.small if expert in self.small else self.main).remove(expert)
