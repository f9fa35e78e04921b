"""What came of a replay, as plain frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .traces import DECODE

if TYPE_CHECKING:
    from .traces import Events, Trace


class Outcome(NamedTuple):
    """What came of each event, int32 [n]; the same names as in `struct hotmoe_replay_results`."""

    accesses: npt.NDArray[np.int32]
    hits: npt.NDArray[np.int32]
    loads: npt.NDArray[np.int32]
    evictions: npt.NDArray[np.int32] | None
    fallbacks: npt.NDArray[np.int32]

    @classmethod
    def zeros(cls, n: int) -> Outcome:
        """Return arrays to be filled."""
        return cls(*np.zeros((5, n), dtype=np.int32))

    def counts(self, group: npt.NDArray[Any], n_groups: int) -> list[Counts]:
        """Return the sums over the events of each group.

        Args:
            group: [n], each event's group.
            n_groups: Number of groups.
        """

        def sums(column: npt.NDArray[np.int32] | None) -> list[int]:
            if column is None:
                return []
            return [round(x) for x in np.bincount(group, weights=column, minlength=n_groups).tolist()]  # exact below 2**53

        events = np.bincount(group, minlength=n_groups).tolist()
        accesses, hits, loads, evictions, fallbacks = map(sums, self)
        return [
            Counts(
                events=events[i],
                accesses=accesses[i],
                hits=hits[i],
                misses=accesses[i] - hits[i],
                loads=loads[i],
                evictions=evictions[i] if evictions else None,
                fallbacks=fallbacks[i],
            )
            for i in range(n_groups)
        ]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over events.

    Attributes:
        events: How many.
        accesses: Distinct experts of each.
        hits: Of them resident when the event began.
        misses: Of them not.
        loads: Experts copied to a slot. More than the misses where an event ran in waves and had to load an expert again, fewer
            where misses may go without a slot.
        evictions: Experts that lost their slot; None for a bound.
        fallbacks: Events in which the policy's or the admission's answer was refused.
    """

    events: int
    accesses: int
    hits: int
    misses: int
    loads: int
    evictions: int | None
    fallbacks: int

    @property
    def hit_rate(self) -> float | None:
        """Hits per access, 0 to 1; None without accesses."""
        return self.hits / self.accesses if self.accesses else None


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """What came of a replay in one bank of experts.

    Attributes:
        layer: Number of the layer.
        bank: 0, or 1 for the second bank of a layer that has two.
        n_expert: Experts in it.
        n_slots: Slots of its pool; None if all layers share one.
        expert_bytes: Bytes of one expert; None if unknown.
        decode: Generated tokens.
        prefill: Prompts.
    """

    layer: int
    bank: int
    n_expert: int
    n_slots: int | None
    expert_bytes: int | None
    decode: Counts
    prefill: Counts


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """What came of a replay.

    Attributes:
        trace: Name of the trace.
        model: Name of the model, "" if unknown.
        policy: Name of the policy.
        admission: Name of the admission; "optimal" for `belady-bypass`.
        scope: "layer" or "global".
        miss: "copy" or "cpu".
        prompts: "turn" or "ubatch".
        slots: Slots of each layer, where layers have different numbers the largest; or of the pool that all layers share.
        requested: The size as it was asked for.
        n_expert: Experts of a layer, where layers have different numbers the largest.
        n_expert_used: Experts that a token uses in a layer, the largest number.
        n_prompt_tokens: Tokens of prompts.
        n_decode_tokens: Tokens generated.
        decode: Generated tokens, all layers.
        prefill: Prompts, all layers.
        first_half: The first half of the generated tokens: with a cache that begins empty.
        second_half: The second half: with a cache that is warm.
        layers: Layer by layer.
        seconds: What the replay took, reading and writing of files left out.
        warnings: What is to be said about the sizes.
    """

    trace: str
    model: str
    policy: str
    admission: str
    scope: str
    miss: str
    prompts: str
    slots: int
    requested: str
    n_expert: int
    n_expert_used: int
    n_prompt_tokens: int
    n_decode_tokens: int
    decode: Counts
    prefill: Counts
    first_half: Counts
    second_half: Counts
    layers: tuple[LayerResult, ...]
    seconds: float
    warnings: tuple[str, ...]

    @property
    def hit_rate(self) -> float | None:
        """Hits per access of generated tokens, 0 to 1; None if the trace has none."""
        return self.decode.hit_rate

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes copied to slots per generated token; None without such tokens, or if the bytes of an expert are unknown."""
        if not self.n_decode_tokens or any(layer.expert_bytes is None for layer in self.layers):
            return None
        return sum(layer.decode.loads * (layer.expert_bytes or 0) for layer in self.layers) / self.n_decode_tokens

    @property
    def worst_layer(self) -> LayerResult | None:
        """The layer with the lowest hit rate of generated tokens; None if there are none."""
        with_hits = [layer for layer in self.layers if layer.decode.accesses]
        return min(with_hits, key=lambda layer: (layer.decode.hit_rate or 0.0, layer.layer, layer.bank), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists and numbers, for JSON.

        What is not said to be about prompts (`prefill_...`) is about generated tokens.
        """
        worst = self.worst_layer
        return {
            "trace": self.trace,
            "model": self.model,
            "policy": self.policy,
            "admission": self.admission,
            "scope": self.scope,
            "miss": self.miss,
            "prompts": self.prompts,
            "slots": self.slots,
            "requested": self.requested,
            "slots_per_layer": [layer.n_slots for layer in self.layers] if self.scope == "layer" else None,
            "n_expert": self.n_expert,
            "n_expert_used": self.n_expert_used,
            "n_layers": len(self.layers),
            "prompt_tokens": self.n_prompt_tokens,
            "decode_tokens": self.n_decode_tokens,
            "accesses": self.decode.accesses,
            "hits": self.decode.hits,
            "misses": self.decode.misses,
            "hit_rate": self.hit_rate,
            "hit_rate_first_half": self.first_half.hit_rate,
            "hit_rate_second_half": self.second_half.hit_rate,
            "loads": self.decode.loads,
            "evictions": self.decode.evictions,
            "fallbacks": self.decode.fallbacks + self.prefill.fallbacks,
            "bytes_per_token": self.bytes_per_token,
            "worst_layer": None
            if worst is None
            else {"layer": worst.layer, "bank": worst.bank, "hit_rate": worst.decode.hit_rate},
            "prefill_accesses": self.prefill.accesses,
            "prefill_hits": self.prefill.hits,
            "prefill_loads": self.prefill.loads,
            "prefill_evictions": self.prefill.evictions,
            "hit_rate_by_layer": [layer.decode.hit_rate for layer in self.layers],
            "seconds": self.seconds,
            "warnings": list(self.warnings),
        }


def make_result(trace: Trace, events: Events, outcome: Outcome, n_slots: Sequence[int] | None, **fields: Any) -> ReplayResult:
    """Sum up what came of each event.

    Args:
        trace: The trace.
        events: Its events that were run.
        outcome: What came of them.
        n_slots: Slots of each bank; None if all share a pool.
        **fields: The other fields of the result.
    """
    n = len(trace.banks)
    later = events.generated * 2 >= events.n_decode_tokens
    decode, prefill = outcome.counts(events.phase, 2)
    first_half, second_half, _ = outcome.counts(np.where(events.phase == DECODE, later, 2), 3)
    by_bank = outcome.counts(events.phase * n + events.bank, 2 * n)  # those of decoding first
    layers = [
        LayerResult(
            layer=bank.layer,
            bank=bank.bank,
            n_expert=bank.n_expert,
            n_slots=n_slots[i] if n_slots else None,
            expert_bytes=bank.expert_bytes,
            decode=by_bank[i],
            prefill=by_bank[n + i],
        )
        for i, bank in enumerate(trace.banks)
    ]
    return ReplayResult(
        trace=trace.name,
        model=trace.model,
        n_expert=max(bank.n_expert for bank in trace.banks),
        n_expert_used=max(trace.n_used_of_banks()),
        n_prompt_tokens=events.n_prefill_tokens,
        n_decode_tokens=events.n_decode_tokens,
        decode=decode,
        prefill=prefill,
        first_half=first_half,
        second_half=second_half,
        layers=tuple(layers),
        **fields,
    )
