"""Two tiers of memory over a file, on recorded routing: a device's slots, and host memory behind them of several kinds.

Host memory keeps, of what went through it:

    apart         what its policy says, which sees what the device missed
    inclusive     the same, but the policy sees what hits on the device, too, as far as there is a copy
    released      the same as apart, but a copy counts as used, too, when its expert loses its slot on the device
    demoted       copies of experts that the device has go first, the oldest upload before the others; one whose expert loses its
                  slot on the device before that is an ordinary copy again
    exclusive     no copy of what the device has; what loses its slot there is copied back
    written back  as demoted; what loses its slot on the device is copied back if there is no copy, and counts as used

The last two need copies from the device, which are counted. Uploads are the same for all, since the device does not look at
what is in host memory. Both tiers are the engine's slot maps, event by event; for `demoted` and `written back` the policy's twin
in Python decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench._slot_maps import SlotMaps
from hotmoe import policies as twins
from hotmoe.policies import EvictionPolicy
from hotmoe.traces import DECODE, Trace
from hotmoe.traces.events import Events

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": twins.Lru,
    "lfru": twins.Lfru,
    "lrfu": twins.Lrfu,
    "slru": twins.Slru,
    "s3fifo": twins.S3Fifo,
}


class Step(NamedTuple):
    """What belongs to an event besides its experts."""

    step: int
    phase: int
    n_tokens: int


# ---- what host memory keeps ----


class Apart:
    """Host memory, the simplest of its kind. Others derive from it."""

    copies = 0  # from the device

    def __init__(self, trace: Trace, n_slots: Sequence[int], policy: str, admission: str = "always") -> None:
        """Make it, empty: slots for each bank of the trace, under a policy and an admission."""
        self.maps = SlotMaps(trace, n_slots, self.policy(policy), admission)

    def policy(self, name: str) -> Any:
        """Return what decides under the name of a policy."""
        return name

    def serve(self, bank: int, hits: list[int], missed: list[int], evicted: list[int], step: Step) -> int:
        """Serve an event, or a wave of one.

        Args:
            bank: Which.
            hits: Experts of the event that the device had.
            missed: Those that it had not.
            evicted: Experts that lost their slot on the device for them.
            step: What else there is to the event.

        Returns:
            How many experts had to be read.
        """
        return self.feed(bank, missed, step)

    def feed(self, bank: int, experts: list[int], step: Step) -> int:
        """Look experts up, as many at a time as there are slots; return how many were not there."""
        n = self.maps.n_slots[bank]
        return sum(len(self.maps.feed(bank, experts[i : i + n], **step._asdict())[0]) for i in range(0, len(experts), n))

    def copied(self, bank: int, experts: list[int]) -> list[int]:
        """Return those of which there is a copy."""
        return [expert for expert in experts if expert in self.maps.resident[bank]]


class Inclusive(Apart):
    """Host memory that is told what hits on the device."""

    def serve(self, bank: int, hits: list[int], missed: list[int], evicted: list[int], step: Step) -> int:
        """See Apart."""
        self.feed(bank, self.copied(bank, hits), step)
        return self.feed(bank, missed, step)


class Released(Apart):
    """Host memory that is told what loses its slot on the device; as native/cache/host_slots.h."""

    def serve(self, bank: int, hits: list[int], missed: list[int], evicted: list[int], step: Step) -> int:
        """See Apart."""
        self.feed(bank, self.copied(bank, evicted), step)
        return self.feed(bank, missed, step)


class Exclusive(Apart):
    """Host memory without copies of what the device has."""

    def serve(self, bank: int, hits: list[int], missed: list[int], evicted: list[int], step: Step) -> int:
        """See Apart."""
        here = self.copied(bank, missed)
        for expert in here:
            self.maps.drop(bank, expert)
        self.feed(bank, evicted, step)
        self.copies += len(evicted) if step.phase == DECODE else 0
        return len(missed) - len(here)


class Demoting(EvictionPolicy):
    """Some experts go first, in the order in which they were demoted; of the others the ones that another policy names."""

    def __init__(self, other: EvictionPolicy) -> None:
        """Put experts before those of another policy."""
        self.other = other
        self.demoted: dict[int, dict[int, None]] = {}  # layer -> experts

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        """Make state for a layer."""
        self.other.setup(layer, n_expert, n_slots, **kw)
        self.demoted[layer] = {}

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        """Hand on."""
        self.other.on_access(layer, experts, hit, **kw)

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> list[int]:
        """Return those that were demoted first, and then those of the other policy."""
        demoted = self.demoted[layer]
        may_go = set(candidates.tolist())
        first = [expert for expert in demoted if expert in may_go][:n]
        if len(first) == n:
            return first
        ordinary = np.array([expert for expert in candidates.tolist() if expert not in demoted], np.int32)
        return first + [int(expert) for expert in self.other.select_evict(layer, n - len(first), ordinary, **kw)]

    def on_load_many(self, layer: int, experts: Any, slots: Any, **kw: Any) -> None:
        """Hand on."""
        self.other.on_load_many(layer, experts, slots, **kw)

    def on_evict_many(self, layer: int, experts: Any, **kw: Any) -> None:
        """Hand on, and forget what was evicted."""
        self.other.on_evict_many(layer, experts, **kw)
        for expert in experts.tolist():
            self.demoted[layer].pop(expert, None)


class Demoted(Apart):
    """Host memory in which copies of what the device has go first."""

    def __init__(self, trace: Trace, n_slots: Sequence[int], policy: str, admission: str = "always") -> None:
        """See Apart."""
        super().__init__(trace, n_slots, policy, admission)
        self.layers = [bank.layer for bank in trace.banks]

    def policy(self, name: str) -> Any:
        """See Apart."""
        self.order = Demoting(POLICIES[name]())
        return self.order

    def serve(self, bank: int, hits: list[int], missed: list[int], evicted: list[int], step: Step) -> int:
        """See Apart."""
        demoted = self.order.demoted[self.layers[bank]]
        for expert in evicted:
            demoted.pop(expert, None)
        reads = self.feed(bank, missed, step)
        for expert in self.copied(bank, missed):
            demoted.pop(expert, None)
            demoted[expert] = None
        return reads


class WrittenBack(Demoted):
    """The same, but what the device gives up is here in any case."""

    def serve(self, bank: int, hits: list[int], missed: list[int], evicted: list[int], step: Step) -> int:
        """See Apart."""
        for expert in evicted:
            self.order.demoted[self.layers[bank]].pop(expert, None)
        self.feed(bank, self.copied(bank, evicted), step)
        copies = self.feed(bank, [expert for expert in evicted if expert not in self.maps.resident[bank]], step)
        self.copies += copies if step.phase == DECODE else 0
        return super().serve(bank, hits, missed, [], step)


KINDS: dict[str, type[Apart]] = {
    "apart": Apart,
    "inclusive": Inclusive,
    "released": Released,
    "demoted": Demoted,
    "exclusive": Exclusive,
    "written back": WrittenBack,
}


# ---- runs ----


class Result(NamedTuple):
    """Experts per generated token: read from the file, copied to the device, copied from it."""

    reads: float
    uploads: float
    copies: float


def waves(events: Events, i: int, there: set[int], n_slots: int) -> Iterator[list[int]]:
    """Yield the distinct experts of an event, as many at a time as there are slots, in the engine's order."""
    ids = events.experts[events.offsets[i] : events.offsets[i + 1]].tolist()
    experts = list(dict.fromkeys(ids))
    if len(experts) > n_slots:
        by_last_use = list(dict.fromkeys(reversed(ids)))[::-1]
        experts = sorted(by_last_use, key=lambda expert: expert not in there)
    for begin in range(0, len(experts), n_slots):
        yield experts[begin : begin + n_slots]


def run(
    trace: Trace,
    events: Events,
    n_device: Sequence[int],
    n_host: Sequence[int],
    kind: str,
    policy: str,
    *,
    admission: str = "always",
    device_policy: str = "lfru",
) -> Result:
    """Run a trace through two tiers.

    Args:
        trace: The trace.
        events: Its events.
        n_device: Slots on the device for each bank.
        n_host: Slots in host memory for each bank.
        kind: One of `KINDS`.
        policy: Of host memory.
        admission: Of host memory.
        device_policy: Of the device.
    """
    reads = uploads = 0
    host = KINDS[kind](trace, n_host, policy, admission)
    with SlotMaps(trace, n_device, device_policy) as device, host.maps:
        for i in range(len(events)):
            bank = int(events.bank[i])
            step = Step(int(events.step[i]), int(events.phase[i]), int(events.n_tokens[i]))
            for experts in waves(events, i, set(device.resident[bank]), n_device[bank]):
                missed, evicted = device.feed(bank, experts, **step._asdict())
                hits = [expert for expert in experts if expert not in missed]
                if not missed and kind != "inclusive":
                    continue
                n = host.serve(bank, hits, missed, evicted, step)
                if step.phase == DECODE:
                    reads += n
                    uploads += len(missed)
    n_tokens = events.n_decode_tokens
    return Result(reads / n_tokens, uploads / n_tokens, host.copies / n_tokens)
