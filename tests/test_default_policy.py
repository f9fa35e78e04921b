"""Why the default policy is the default: what bench/policies.md and bench/host_tier.md say of published routing."""

from __future__ import annotations

import statistics
from pathlib import Path

from bench._slot_maps import slots_of
from bench._two_tiers import run
from hotmoe._binding import lib, text
from hotmoe.replay import replay
from hotmoe.traces import Trace
from hotmoe.traces.events import Events

CELLS = ((0.1, 0.25), (0.25, 0.25), (0.25, 0.5), (0.5, 0.25), (0.5, 0.5))  # of the experts on the device, in host memory
TRACES = sorted((Path(__file__).parent / "traces").glob("*.csv"))


def test_the_default_is_better_than_lru_and_nowhere_much_worse() -> None:
    default = text(lib.hotmoe_policy_default())
    assert text(lib.hotmoe_admission_default()) == "always"
    gains = []
    for path in TRACES:
        trace = Trace.load(path)
        for slots in ("10%", "25%", "50%"):
            lru, ours = (replay(trace, policy, slots=slots) for policy in ("lru", default))
            if lru.decode.evictions:  # else there is nothing to decide
                gains.append((ours.hit_rate - lru.hit_rate) * 100)
    assert len(gains) == 9
    assert statistics.mean(gains) >= 1.5
    assert min(gains) >= -0.3


def test_what_host_memory_does_by_default_saves_reads() -> None:
    """Against LRU that is told only what the device missed; each half of the difference, too."""
    default = text(lib.hotmoe_policy_default())
    saved: dict[tuple[str, str], list[float]] = {("released", default): [], ("apart", default): [], ("released", "lru"): []}
    for path in TRACES:
        trace = Trace.load(path)
        events = Events.of(trace)
        for device, host in CELLS:
            sizes = slots_of(trace, device), slots_of(trace, host)
            lru = run(trace, events, *sizes, "apart", "lru")
            for (kind, policy), values in saved.items():
                result = run(trace, events, *sizes, kind, policy)
                assert (result.uploads, result.copies) == (lru.uploads, 0)
                values.append(100 * (1 - result.reads / lru.reads))
    means = {key: statistics.mean(values) for key, values in saved.items()}
    assert means["released", default] >= 6
    assert means["released", default] - means["apart", default] >= 3
    assert means["released", "lru"] >= 3
    assert min(saved["released", default]) >= -5
