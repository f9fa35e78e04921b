"""Why the default policy is the default: what `bench/policies.md` says about published routing, asserted."""

from __future__ import annotations

import statistics
from pathlib import Path

from hotmoe._binding import lib, text
from hotmoe.replay import replay
from hotmoe.traces import Trace

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
