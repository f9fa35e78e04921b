"""What a policy written in Python derives from.

One object serves all layers of a model: every method is told the layer. All methods are called from the thread that evaluates,
between the router and the experts of a layer, so what they take, every layer of every token waits for. Arrays are views of
memory that the cache owns: they are valid during the call; copy what you keep.

All methods but `reset` and those about state take further keyword arguments, and more may come, so write `**kw`:

    phase    "decode" (one token of each sequence) or "prefill"
    step     number of the ubatch, from 1
    n_tokens tokens in the ubatch
    weights  float32 [n], the router's weights of the event's experts, in their order, summed over the ubatch's tokens;
             None if nobody wants them (`wants_weights`) or the model's graph does not tell them
             (nor does host memory know those of an expert that has just lost its slot on the device)
    bank     0, or 1 for the second bank of a layer that has two, which is served by an object of its own

If a method raises, or answers what cannot be, the cache evicts the least recently used experts in that event, goes on, counts it
(`stats().total.policy_fallbacks`), and the exception is raised when the evaluation at work returns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["AdmissionPolicy", "EvictionPolicy", "Experts", "Hits", "ScorePolicy"]

Experts: TypeAlias = npt.NDArray[np.int32]  # [n] expert ids, distinct
Hits: TypeAlias = npt.NDArray[np.uint8]  # [n] 1 where the expert was resident when the event began


class _Stateful:
    """What eviction and admission have in common."""

    wants_weights: bool | None = None
    """Whether `weights` is to be read back from the device, which costs some microseconds per event there. None: if a method
    takes `weights` or `**kw`."""

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer; called once before its first event.

        Args:
            layer: Number of the layer; -1 in a replay whose layers share one pool, where an expert's id is
                layer * n_expert + id.
            n_expert: Experts of the layer.
            n_slots: Slots that its pool has.
            **kw: `bank`.
        """

    def on_step(self, step: int, **kw: Any) -> None:
        """See that a ubatch begins, before its first event.

        Args:
            step: Its number, from 1.
            **kw: `phase`, `n_tokens`.
        """

    def reset(self) -> None:
        """Forget everything: all slots of all layers are free again."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state that `load_state_dict` can restore: by default, of all attributes of the object."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(copy.deepcopy(state))


class EvictionPolicy(_Stateful):
    """Decides which experts lose their slots.

    Only `select_evict` is a must.

    Examples:
        >>> class Mru(EvictionPolicy):
        ...     '''Evict the most recently used.'''
        ...
        ...     def __init__(self):
        ...         self.clock, self.used = 0, {}
        ...
        ...     def on_access(self, layer, experts, hit, **kw):
        ...         self.clock += 1
        ...         for expert in experts.tolist():
        ...             self.used[layer, expert] = self.clock
        ...
        ...     def select_evict(self, layer, n, candidates, **kw):
        ...         return sorted(candidates.tolist(), key=lambda e: -self.used[layer, e])[:n]
        >>> cache = ExpertCache(slots=32, policy=Mru)  # doctest: +SKIP
    """

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """See the experts that a layer is about to use; one call per event. By default, calls `on_hit` for each hit.

        Args:
            layer: Number of the layer.
            experts: int32 [n], distinct, in the order of their first use.
            hit: uint8 [n], 1 where the expert is resident.
            **kw: See the module.
        """
        for expert in experts[hit != 0].tolist():
            self.on_hit(layer, expert, **kw)

    def on_hit(self, layer: int, expert: int, **kw: Any) -> None:
        """See one expert that is used and resident."""

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> Sequence[int] | npt.NDArray[Any]:
        """Return the experts that lose their slots.

        Args:
            layer: Number of the layer.
            n: How many.
            candidates: int32 [m], m >= n: resident experts that the present event does not use.
            **kw: See the module.

        Returns:
            n distinct ids out of candidates.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method select_evict")

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        """See one expert that got a slot."""

    def on_load_many(self, layer: int, experts: Experts, slots: npt.NDArray[np.int32], **kw: Any) -> None:
        """See the experts that got slots, one call per event. By default, calls `on_load` for each."""
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            self.on_load(layer, expert, slot, **kw)

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        """See one expert that lost its slot."""

    def on_evict_many(self, layer: int, experts: Experts, **kw: Any) -> None:
        """See the experts that lost their slots, one call per event. By default, calls `on_evict` for each."""
        for expert in experts.tolist():
            self.on_evict(layer, expert, **kw)


class ScorePolicy(EvictionPolicy):
    """An eviction policy that gives each expert a score; the lowest go first, equal ones by expert id.

    `score` is called for every candidate whenever something must go: with 100 slots that is some 20 microseconds in an event
    with a miss. `score_many` does it in one call.

    Examples:
        >>> class Lfu(ScorePolicy):
        ...     def __init__(self):
        ...         self.count = collections.Counter()
        ...
        ...     def on_access(self, layer, experts, hit, **kw):
        ...         self.count.update((layer, e) for e in experts.tolist())
        ...
        ...     def score(self, layer, expert, **kw):
        ...         return self.count[layer, expert]
    """

    def score(self, layer: int, expert: int, **kw: Any) -> float:
        """Return how much an expert is worth keeping; the lowest goes first."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score or score_many")

    def score_many(self, layer: int, experts: Experts, **kw: Any) -> npt.ArrayLike:
        """Return the scores of experts, [n]. By default, calls `score` for each."""
        return [self.score(layer, expert, **kw) for expert in experts.tolist()]

    def select_evict(self, layer: int, n: int, candidates: Experts, **kw: Any) -> Sequence[int] | npt.NDArray[Any]:
        """Return the n candidates with the lowest scores."""
        scores = np.asarray(self.score_many(layer, candidates, **kw))
        if scores.shape != candidates.shape:
            raise ValueError(f"score_many returned an array of shape {scores.shape} for {len(candidates)} experts")
        if np.isnan(scores).any():
            raise ValueError("a score is NaN")
        return candidates[np.lexsort((candidates, scores))[:n]]


class AdmissionPolicy(_Stateful):
    """Decides whether an expert that missed may keep its slot.

    Every miss is copied to a slot, but one that is not admitted has it on loan: slots on loan are the first to be taken again.
    An expert that is used again while its slot is on loan is judged again.
    """

    def on_access(self, layer: int, experts: Experts, hit: Hits, **kw: Any) -> None:
        """See the experts that a layer is about to use; as `EvictionPolicy.on_access`."""

    def admit(self, layer: int, expert: int, **kw: Any) -> bool:
        """Return whether an expert may keep its slot."""
        raise NotImplementedError(f"{type(self).__name__} needs a method admit or admit_many")

    def admit_many(self, layer: int, experts: Experts, **kw: Any) -> npt.ArrayLike:
        """Return which experts may keep their slots, [n]. By default, calls `admit` for each."""
        return [self.admit(layer, expert, **kw) for expert in experts.tolist()]

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        """See one expert, admitted or not, that lost its slot."""

    def on_evict_many(self, layer: int, experts: Experts, **kw: Any) -> None:
        """See the experts that lost their slots, one call per event. By default, calls `on_evict` for each."""
        for expert in experts.tolist():
            self.on_evict(layer, expert, **kw)
