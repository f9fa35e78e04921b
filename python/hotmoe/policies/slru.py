"""Segmented least recently used."""

from __future__ import annotations

from typing import Any

from ._tools import at_least
from .base import EvictionPolicy, Experts, Hits


class Slru(EvictionPolicy):
    """Segmented LRU: an expert that was used once cannot push out one that was used again and again.

    A loaded expert starts on probation; a hit moves it to the protected segment. If that is full, its least recently used expert
    goes back on probation, as the most recent one there. Victims come from probation, and from the protected segment only when
    probation has no candidate left; the least recently used go first.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer 1994.
    """

    wants_weights = False

    def __init__(self, protected: float = 0.8) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            protected: Share of the slots that the protected segment may hold.
        """
        self.share = at_least(0, "protected", protected)
        self.room: dict[int, int] = {}  # layer -> experts that the protected segment may hold
        self.probation: dict[int, list[int]] = {}  # layer -> experts, least recently used first
        self.protected: dict[int, list[int]] = {}

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.room[layer] = int(n_slots * self.share)
        self.probation[layer] = []
        self.protected[layer] = []

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Move the experts that were hit."""
        probation, protected = self.probation[layer], self.protected[layer]
        for expert in experts.tolist():
            if expert in protected:
                protected.remove(expert)
                protected.append(expert)
            elif expert in probation:
                probation.remove(expert)
                protected.append(expert)
                if len(protected) > self.room[layer]:
                    probation.append(protected.pop(0))

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return the first n candidates, those on probation before those that are protected."""
        may_go = set(candidates.tolist())
        return [expert for expert in self.probation[layer] + self.protected[layer] if expert in may_go][:n]

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        """Put an expert on probation."""
        self.probation[layer].append(expert)

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        """Take an expert out of its segment."""
        segment = self.probation[layer] if expert in self.probation[layer] else self.protected[layer]
        segment.remove(expert)

    def reset(self) -> None:
        """Empty the segments."""
        for segment in (*self.probation.values(), *self.protected.values()):
            segment.clear()
