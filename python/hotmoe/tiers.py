"""Tier managers: what host memory keeps of experts that are mapped from the model's file.

Where experts are mapped from the GGUF file, the system's page cache is the second tier: it fills as pages are touched, and the
system takes back what it likes. A tier manager is told after each step (ubatch) which experts were used and which ones host
memory is to give up, since the cache's `host_slots` went to others, and it answers with what to read ahead and what to let go
of. It names experts; the cache turns them into bytes of the file, and refuses and counts what cannot be, so a bad manager can
be slow, but not wrong.

    >>> class KeepUpperLayers(TierManager):
    ...     def on_step(self, used, dropped, **kw):
    ...         return {"dontneed": dropped[dropped["layer"] < 8], "willneed": used[used["entered"]]}
    >>> cache = ExpertCache(slots=8, tier_manager=KeepUpperLayers, host_slots=32)  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ._binding import check, ffi, lib
from .policies.registry import Kind

__all__ = ["EXPERT", "NoTier", "Readahead", "TierBank", "TierManager", "register_tier_manager"]

C = TypeVar("C", bound=type)

EXPERT = np.dtype(
    {
        "names": ["layer", "bank", "expert", "entered"],
        "formats": ["i4", "i4", "i4", "?"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 16,
    }
)
"""One expert: number of the layer; 0, or 1 for the second bank of a layer that has two; id; whether it entered host memory."""

Experts: TypeAlias = npt.NDArray[Any]  # [n] of EXPERT
Requests: TypeAlias = "Mapping[str, Experts | Sequence[tuple[int, int] | tuple[int, int, int]]] | None"


@dataclasses.dataclass(frozen=True)
class TierBank:
    """The experts of a layer that share a routing.

    Attributes:
        layer: Number of the layer.
        bank: 0, or 1 for the second bank of a layer that has two.
        n_expert: Experts of it.
        host_slots: Experts of it that host memory holds at most; n_expert if there is no limit.
        expert_bytes: Of one expert, all tensors.
    """

    layer: int
    bank: int
    n_expert: int
    host_slots: int
    expert_bytes: int


class TierManager:
    """Decides what to read ahead and what to let go of.

    One object serves all layers of one model. Its methods run on the thread that evaluates, between two steps. If one raises,
    or answers what cannot be understood, nothing is done in that step, it is counted (`stats().tier.failed_steps`), and the
    exception is raised when the call at work returns.
    """

    def setup(self, banks: Sequence[TierBank], **kw: Any) -> None:
        """See what there is, once, before the first step.

        Args:
            banks: Those whose experts lie in host memory.
            **kw: More may come.
        """

    def on_step(self, used: Experts, dropped: Experts, **kw: Any) -> Requests:
        """See what a step used, and answer with what is to be done.

        Args:
            used: [n] of `EXPERT`, distinct, in the order of their first use. `used["layer"]`, `used["expert"]` are int32 arrays,
                `used["entered"]` is a bool array: the expert was not in host memory before this step, by count, and is now.
                A view that is valid during the call.
            dropped: [m] of `EXPERT`, distinct: those that host memory is to give up. An expert can be both used and dropped.
            **kw: `step` (number of the ubatch, from 1), `phase` ("decode" or "prefill"), `n_tokens`; more may come.

        Returns:
            None for nothing; else a mapping of "willneed" (read it into host memory) and "dontneed" (let go of it) to experts,
            which is done in its order. Experts are rows of `used` and `dropped`, or any array of that type, or a list of
            (layer, expert), or one of (layer, bank, expert). All together no more than two for each expert of the model.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method on_step")

    def reset(self) -> None:
        """Forget everything: host memory is taken to be empty."""


class NoTier(TierManager):
    """Leaves it to the page cache, as the built-in `none`."""

    def on_step(self, used: Experts, dropped: Experts, **kw: Any) -> Requests:
        """Ask for nothing."""
        return None


class Readahead(TierManager):
    """Lets go of what host memory drops, then reads ahead what entered it, as the built-in `readahead`."""

    def on_step(self, used: Experts, dropped: Experts, **kw: Any) -> Requests:
        """Follow the count."""
        return {"dontneed": dropped, "willneed": used[used["entered"]]}


TierSpec: TypeAlias = "str | type[TierManager] | TierManager | None"


class _TierKind(Kind[TierManager]):
    """Tier managers: their C functions take other structs than those of policies."""

    def try_native(self, spec: str) -> None:
        """Make an object of the C side, and free it."""
        bank = ffi.new("struct hotmoe_tier_bank *", {"n_expert": 8, "host_slots": 4, "expert_bytes": 4096})
        config = ffi.new("struct hotmoe_tier_config *", {"n_banks": 1, "banks": bank})
        out = ffi.new("struct hotmoe_tier_manager *")
        check(lib.hotmoe_tier_create(spec.encode(), config, out))
        if out.free:
            out.free(out.context)

    def wrap(self, made: Any, label: str, another: Callable[[], Any]) -> Any:
        """Return what the C side's calls to a Python object go through."""
        from ._tier_bridge import TierSource  # not before somebody has a tier manager in Python

        return TierSource(made, label, another)


TIERS = _TierKind("tier manager", TierManager, "hotmoe.tiers", prefix="tier")


def register_tier_manager(name: str) -> Callable[[C], C]:
    """Give a `TierManager` class a name, under which `ExpertCache(tier_manager=)` finds it.

    Args:
        name: Any, but that of a built-in one. A later class of the same name takes the earlier one's place.

    Raises:
        ArgumentError: If the name is that of a built-in tier manager, or has a character that has a meaning.
        TypeError: If it is not a subclass of `TierManager`.
    """
    return TIERS.register(name)
