"""Admission after the second miss."""

from __future__ import annotations

from typing import Any

from ._tools import StepClock, at_least
from .base import AdmissionPolicy, Experts, Hits


class SecondMiss(AdmissionPolicy):
    """An expert is admitted when it is needed again after a miss that is still remembered.

    A first miss is refused and remembered for `memory`, counted from the last time that the expert was refused. Admission
    forgets it: an expert that loses its slot starts anew.
    """

    wants_weights = False

    def __init__(self, memory: int = 64) -> None:
        """Make an admission without state; `setup` makes it for each layer.

        Args:
            memory: Ubatches of the layer, at decode tokens, for which a miss is remembered.
        """
        self.memory = at_least(1, "memory", memory)
        self.time = StepClock()
        self.refused: dict[int, dict[int, int]] = {}  # layer -> expert -> time of the miss that is remembered

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.refused[layer] = {}

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Note that time passes."""
        self.time.tick(layer, kw["step"])

    def admit(self, layer: int, expert: int, **kw: Any) -> bool:
        """Return whether an earlier miss is remembered."""
        now, refused = self.time.now[layer], self.refused[layer]
        earlier = refused.pop(expert, None)
        if earlier is not None and now - earlier <= self.memory:
            return True
        refused[expert] = now
        return False

    def reset(self) -> None:
        """Forget all misses."""
        self.time.reset()
        for refused in self.refused.values():
            refused.clear()
