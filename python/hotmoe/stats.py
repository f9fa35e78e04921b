"""Counters of an expert cache, as plain frozen dataclasses.

An *event* is what one layer needs for one ubatch: a set of distinct experts. A *step* is one ubatch. *Decode* steps hold
one token of each of their sequences, *prefill* steps more than one. Warm-up is left out, except that it is counted as a
reason for a bypass.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Counters:
    """What happened in the pools of one layer, or of all.

    Attributes:
        events: Events that went through a pool.
        hits: Distinct experts of an event that were resident when it began.
        misses: Distinct experts of an event that were not.
        evictions: Experts that lost their slot.
        uploads: Copies to the device, one per expert tensor.
        uploaded_bytes: Bytes in those copies.
        not_admitted: Experts of an event that the admission policy let have a slot on loan only.
        policy_fallbacks: Events in which a policy failed or its answer was refused: the least recently used experts went
            instead, or all were admitted.
        waves: Parts in which events were computed that need more experts than there are slots.
        wait_ns: Nanoseconds until the expert ids were there: the device's time as much as ours.
        hook_ns: Nanoseconds of all other work of the cache.
        bypassed: Events that took the stock path instead, by reason.
    """

    events: int
    hits: int
    misses: int
    evictions: int
    uploads: int
    uploaded_bytes: int
    not_admitted: int
    policy_fallbacks: int
    waves: int
    wait_ns: int
    hook_ns: int
    bypassed: Mapping[str, int]

    @property
    def hit_rate(self) -> float | None:
        """Hits per looked-up expert, 0 to 1; None if nothing was looked up."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


@dataclasses.dataclass(frozen=True)
class LayerCounters(Counters):
    """Counters of one bank of experts.

    Attributes:
        layer: Index of the layer.
        bank: 0, or 1 for the second bank of a layer that has two.
    """

    layer: int
    bank: int


@dataclasses.dataclass(frozen=True)
class StepCounters:
    """Ubatches.

    Attributes:
        steps: Ubatches, warm-up left out.
        tokens: Tokens in them.
        graphs_built: Steps that could not reuse the previous graph.
        bypassed: Steps with at least one event that took the stock path, by reason.
    """

    steps: int
    tokens: int
    graphs_built: int
    bypassed: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class PhaseStats(Counters):
    """Counters of one phase, or of both together; the inherited ones are sums over all layers.

    Attributes:
        steps: Ubatches of the phase.
        layers: The same counters layer by layer, in the order of the plan's banks.
    """

    steps: StepCounters
    layers: tuple[LayerCounters, ...]

    @property
    def uploaded_bytes_per_token(self) -> float | None:
        """Bytes copied to devices per token of the phase; None before the first token."""
        return self.uploaded_bytes / self.steps.tokens if self.steps.tokens else None


@dataclasses.dataclass(frozen=True)
class AdviceCounters:
    """What the system was told about the page cache, one way.

    Attributes:
        calls: Ranges of bytes that it was told about: one per tensor of an expert.
        bytes: Bytes of the whole pages in them.
        errors: Of the calls, those in which it reported an error.
    """

    calls: int
    bytes: int
    errors: int


@dataclasses.dataclass(frozen=True)
class TierStats:
    """What a tier manager was told, and what came of its requests.

    Attributes:
        steps: Ubatches that it was told of.
        used: Experts in them.
        entered: Of these, the ones that entered host memory, by count.
        dropped: Experts that host memory gave up, by count.
        failed_steps: Steps in which it failed, or its answer could not be understood: nothing was done.
        refused_requests: Those about a layer or an expert that there is not.
        refused_ranges: Tensors that do not lie in a mapped file.
        willneed: What was read ahead.
        dontneed: What was let go of.
        advise_ns: Nanoseconds in the system.
        manager_ns: Nanoseconds in the tier manager.
    """

    steps: int
    used: int
    entered: int
    dropped: int
    failed_steps: int
    refused_requests: int
    refused_ranges: int
    willneed: AdviceCounters
    dontneed: AdviceCounters
    advise_ns: int
    manager_ns: int


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Reading of streamed experts since the cache was attached, or since `reset_stats()`.

    Caches over one model share the readers and their counters.

    Attributes:
        host_hits: Experts that a device missed, and host memory had.
        host_misses: Experts that a device missed, and host memory had not.
        host_evictions: Experts that lost their place in host memory.
        host_not_admitted: Experts that a device missed, and that `host_admission` let have a place on loan only.
        host_policy_fallbacks: Times that `host_policy` or `host_admission` failed or its answer was refused.
        reads: Calls to the system.
        bytes: Bytes of experts that arrived.
        disk_bytes: Bytes that the system read for it, `direct_bytes + buffered_bytes`.
        direct_bytes: Bytes read past the page cache.
        buffered_bytes: Bytes read through it.
        retries: Calls that were repeated after an error.
        errors: Reads that failed for good.
        read_ns: Nanoseconds inside of reads, summed over the threads.
        wait_ns: Nanoseconds that evaluations stood still for reads.
        warning: Why files are not read past the page cache though that was not switched off; "" if they are.
    """

    host_hits: int
    host_misses: int
    host_evictions: int
    host_not_admitted: int
    host_policy_fallbacks: int
    reads: int
    bytes: int
    disk_bytes: int
    direct_bytes: int
    buffered_bytes: int
    retries: int
    errors: int
    read_ns: int
    wait_ns: int
    warning: str


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """All counters of an expert cache since it was attached, or since `reset_stats()`.

    Attributes:
        total: Prefill and decode together.
        prefill: Ubatches of more than one token of a sequence.
        decode: Ubatches of one token of each sequence.
        tier: Of the tier manager, None without one.
        store: Of streamed experts, None if nothing is streamed.
    """

    total: PhaseStats
    prefill: PhaseStats
    decode: PhaseStats
    tier: TierStats | None = None
    store: StoreStats | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists and numbers, for JSON; the derived rates included."""
        out = dataclasses.asdict(self)
        for name in ("total", "prefill", "decode"):
            phase, stats = out[name], getattr(self, name)
            phase["hit_rate"] = stats.hit_rate
            phase["uploaded_bytes_per_token"] = stats.uploaded_bytes_per_token
            for row, layer in zip(phase["layers"], stats.layers, strict=True):
                row["hit_rate"] = layer.hit_rate
        return out

    def to_json(self, indent: int | None = 2) -> str:
        """Return `as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)
