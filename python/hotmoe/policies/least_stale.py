"""Least-stale."""

from __future__ import annotations

from typing import Any

from ._tools import StepClock, at_least
from .base import EvictionPolicy, Experts, Hits


class LeastStale(EvictionPolicy):
    """Least-stale: the experts of the last tokens stay, the others go first in, first out.

    An expert is fresh if it was used in the last `window` ubatches, else stale. Stale ones go first, in the order in which they
    were loaded; when only fresh ones are left, the one goes whose use is the oldest. In a pool that all layers share, window=1 is
    the policy of the paper: fresh is what the present forward pass has used. In a pool of one layer that would be the experts
    of the event itself, which never go, and the rule plain FIFO.

    Source: Hoang, Jaiswal, Samragh and Cho, "SpecMD: a comprehensive study on speculative expert prefetching", 2026.
    """

    wants_weights = False

    def __init__(self, window: int = 2) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            window: Ubatches, the present one included, in which a use makes an expert fresh.
        """
        self.window = at_least(1, "window", window)
        self.time = StepClock()
        self.clock = 0
        self.used_in: dict[int, list[int]] = {}  # layer -> [n_expert] time of the last use
        self.used: dict[int, list[int]] = {}  # layer -> [n_expert] clock of the last use
        self.loaded: dict[int, list[int]] = {}  # layer -> [n_expert] clock of loading

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.used_in[layer] = [0] * n_expert
        self.used[layer] = [0] * n_expert
        self.loaded[layer] = [0] * n_expert

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Note when each expert was used."""
        now = self.time.tick(layer, kw["step"])
        for expert in experts.tolist():
            self.clock += 1
            self.used_in[layer][expert] = now
            self.used[layer][expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return n candidates, stale ones before fresh ones."""
        now, used_in = self.time.now[layer], self.used_in[layer]
        used, loaded = self.used[layer], self.loaded[layer]

        def rank(expert: int) -> tuple[bool, int]:
            fresh = now - used_in[expert] < self.window
            return fresh, used[expert] if fresh else loaded[expert]

        return sorted(candidates.tolist(), key=rank)[:n]

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        """Note when an expert was loaded."""
        self.clock += 1
        self.loaded[layer][expert] = self.clock

    def reset(self) -> None:
        """Forget all uses."""
        self.time.reset()
        for layer, used in self.used.items():
            self.setup(layer, len(used), 0)
