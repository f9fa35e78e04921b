"""Admission by a ghost queue."""

from __future__ import annotations

from typing import Any

from ._tools import at_least
from .base import AdmissionPolicy


class Ghost(AdmissionPolicy):
    """An expert is admitted if it is among the last that lost a slot or were refused one.

    The queue of their ids has a bounded length and forgets the oldest. An id that comes again moves to its new end, and one that
    is admitted leaves it.
    """

    wants_weights = False

    def __init__(self, size: float = 1.0) -> None:
        """Make an admission without state; `setup` makes it for each layer.

        Args:
            size: How many ids the queue holds, as a multiple of the slots; at least one.
        """
        self.size = at_least(0, "size", size)
        self.room: dict[int, int] = {}  # layer -> ids that the queue may hold
        self.ghosts: dict[int, list[int]] = {}  # layer -> ids, the oldest first

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.room[layer] = max(1, int(n_slots * self.size))
        self.ghosts[layer] = []

    def admit(self, layer: int, expert: int, **kw: Any) -> bool:
        """Return whether an expert is in the queue."""
        if expert in self.ghosts[layer]:
            self.ghosts[layer].remove(expert)
            return True
        self._remember(layer, expert)
        return False

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        """Put an expert into the queue."""
        if expert in self.ghosts[layer]:
            self.ghosts[layer].remove(expert)
        self._remember(layer, expert)

    def _remember(self, layer: int, expert: int) -> None:
        self.ghosts[layer].append(expert)
        del self.ghosts[layer][: -self.room[layer]]

    def reset(self) -> None:
        """Empty the queues."""
        for ghosts in self.ghosts.values():
            ghosts.clear()
