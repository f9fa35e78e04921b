"""Least frequently used, with decay."""

from __future__ import annotations

from .lrfu import Lrfu


class Lfu(Lrfu):
    """Least frequently used, with decay: evicts the expert with the lowest count of uses, each worth less as time passes.

    Counts are kept for experts that are not resident, too, so that a returning expert is judged by its history. Ties go to the
    least recently used. `Lrfu` with a long half-life is the same.
    """

    def __init__(self, half_life: float = 64.0) -> None:
        """Make a policy without state; `setup` makes it for each layer.

        Args:
            half_life: Ubatches of the layer, at decode tokens, in which a count halves.
        """
        super().__init__(half_life)
