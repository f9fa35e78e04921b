"""A list of experts to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PolicyError
from .base import EvictionPolicy, Experts, Hits


class Static(EvictionPolicy):
    """A list of experts to keep, from a profile of earlier use.

    Experts that are not on the list go first, least recently used first; then those on the list, from its end. Nothing is loaded
    ahead: an expert of the list comes when it is used for the first time, and stays.

    Examples:
        >>> Static([3, 5, 7]).pins_of(0)
        [3, 5, 7]
        >>> Static({0: [3, 5], 2: [1]}).pins_of(2)
        [1]
        >>> Static("0:3 5;2:1").pins_of(0)
        [3, 5]
    """

    wants_weights = False

    def __init__(self, pins: str | int | Sequence[int] | Mapping[int, Sequence[int]] = ()) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            pins: Expert ids, hottest first: of every layer, or by layer; or text as the native policy takes it.

        Raises:
            PolicyError: If the text cannot be read.
        """
        self.pins = _parsed(str(pins)) if isinstance(pins, (str, int)) else pins
        self.clock = 0
        self.pinned: dict[int, list[int]] = {}  # layer -> [n_expert] 0 if it is not on the list, else the larger the hotter
        self.used: dict[int, list[int]] = {}  # layer -> [n_expert] clock of the last use

    def pins_of(self, layer: int) -> list[int]:
        """Return the list of a layer."""
        return list(self.pins.get(layer, ()) if isinstance(self.pins, Mapping) else self.pins)

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer.

        Raises:
            PolicyError: If the layer does not have an expert that is on its list, or has it there twice.
        """
        pins = self.pins_of(layer)
        if len(set(pins)) != len(pins) or not all(0 <= expert < n_expert for expert in pins):
            raise PolicyError(f"pins {pins} of layer {layer} must be different ids in [0, {n_expert})")
        self.pinned[layer] = [0] * n_expert
        for i, expert in enumerate(pins):
            self.pinned[layer][expert] = len(pins) - i
        self.used[layer] = [0] * n_expert

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """Note when each expert was used."""
        for expert in experts.tolist():
            self.clock += 1
            self.used[layer][expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> list[int]:
        """Return n candidates, those that are not on the list before the others."""
        pinned, used = self.pinned[layer], self.used[layer]
        return sorted(candidates.tolist(), key=lambda e: (pinned[e], used[e]))[:n]

    def reset(self) -> None:
        """Forget all uses; the lists stay."""
        for used in self.used.values():
            used[:] = [0] * len(used)


def _parsed(text: str) -> list[int] | dict[int, list[int]]:
    """Return the lists of "3 5 7", or "0:3 5;2:1" by layer."""
    try:
        if ":" not in text:
            return [int(expert) for expert in text.split()]
        lists = [entry.partition(":") for entry in text.split(";")]
        return {int(layer): [int(expert) for expert in experts.split()] for layer, _, experts in lists}
    except ValueError:
        raise PolicyError(f'pins={text!r} must be ids with spaces between them, "3 5 7", or such by layer, "0:3 5;2:1"') from None
