"""Random."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._tools import at_least
from .base import EvictionPolicy, Experts

GAMMA = 0x9E3779B97F4A7C15  # what SplitMix64 adds per draw: 2^64 over the golden ratio
MASK = 2**64 - 1


class Random(EvictionPolicy):
    """Random: evicts any candidate; the same seed gives the same victims.

    Each time something must go, a number is drawn, every candidate gets that number scrambled with its own id, and the lowest
    go. Each layer has a sequence of its own.

    Source of the generator: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
    """

    wants_weights = False

    def __init__(self, seed: int = 0) -> None:
        """Make a policy without state; `setup` makes it for each layer."""
        self.seed = int(at_least(0, "seed", seed))
        self.start: dict[int, int] = {}  # layer -> state of its generator before the first draw
        self.state: dict[int, int] = {}

    def setup(self, layer: int, n_expert: int, n_slots: int, *, bank: int = 0, **kw: Any) -> None:
        """Make state for a layer."""
        stream = 2 * (layer + 1) + bank
        self.start[layer] = self.state[layer] = scrambled_one(self.seed + GAMMA * stream)

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> Experts:
        """Return n candidates."""
        self.state[layer] = (self.state[layer] + GAMMA) & MASK
        drawn = scrambled_one(self.state[layer])
        ranks = scrambled(np.uint64(drawn) + np.uint64(GAMMA) * candidates.astype(np.uint64))
        return candidates[np.lexsort((candidates, ranks))[:n]]

    def reset(self) -> None:
        """Begin all sequences anew."""
        self.state = dict(self.start)


def scrambled(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers that look random, one for each number; products wrap around at 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def scrambled_one(z: int) -> int:
    """Return the same for one number."""
    return int(scrambled(np.array([z & MASK], np.uint64))[0])
