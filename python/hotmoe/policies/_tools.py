"""What several of the built-in policies' twins need."""

from __future__ import annotations

from ..errors import PolicyError

__all__ = ["StepClock", "at_least"]


class StepClock:
    """The time of each layer: how many ubatches it took part in.

    At decode that is tokens. The waves of one large event are one point in time, and so are the layers of a ubatch in a pool that
    all layers share; what took the stock path does not count.
    """

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.step: dict[int, int] = {}

    def tick(self, layer: int, step: int) -> int:
        """Return the time of an event that happens in a step."""
        if self.step.get(layer) != step:
            self.step[layer] = step
            self.now[layer] = self.now.get(layer, 0) + 1
        return self.now[layer]

    def reset(self) -> None:
        """Begin anew."""
        self.now.clear()
        self.step.clear()


def at_least(lowest: float, name: str, value: float) -> float:
    """Return the value of an option.

    Raises:
        PolicyError: If it is below the lowest that makes sense.
    """
    if not value >= lowest:
        raise PolicyError(f"{name}={value} must be at least {lowest}")
    return value
