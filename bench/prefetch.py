"""Would it pay to read ahead for the next layer?

While layer l computes, the disk could read experts of layer l + 1 that are not in memory. Which ones is a guess. This asks
of recorded routing how good a guess can be that costs nothing at run time: for each pair of neighbouring layers, how often an
expert of one was used together with an expert of the other, counted over the tokens before (learned from the trace itself while
it runs). The guess for a token are the `budget` experts of the next layer with the highest sum over the experts that this layer
uses, without those that have a slot.

    useful     share of the guesses that the next layer then needed and would have missed
    covered    share of all misses that were guessed
    extra      bytes read in vain, as a share of the bytes of all misses

An expert read in vain takes disk time from the misses of the layer that computes now, and a slot on loan. Reading ahead pays if
`covered` is high where `extra` is low. Slot maps and policies are the engine's (hotmoe.replay).

    python -m bench.prefetch TRACE... [--slots 10%,25%,50%] [--budgets 1,2,4] [--policy NAME] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench._slot_maps import SlotMaps, slots_of
from hotmoe.traces import DECODE, Trace


def study(trace: Trace, share: float, budgets: list[int], policy: str | None) -> list[dict[str, Any]]:
    """Run a trace; return what each budget would have guessed."""
    banks = tuple(bank for bank in trace.banks if bank.bank == 0)
    trace = dataclasses.replace(trace.rows(trace.bank == 0), banks=banks, where=None)
    with SlotMaps(trace, slots_of(trace, share), policy) as maps:
        index = {bank.layer: i for i, bank in enumerate(banks)}
        together = [np.zeros((a.n_expert, b.n_expert)) for a, b in itertools.pairwise(banks)]
        useful, guessed, misses = dict.fromkeys(budgets, 0), dict.fromkeys(budgets, 0), 0
        previous: tuple[int, list[int]] = (-1, [])
        for row in range(len(trace)):
            pool = index[int(trace.layer[row])]
            experts = [int(e) for e in trace.experts[row] if e >= 0]
            decode = trace.phase[row] == DECODE
            missing = set(experts) - maps.resident[pool]
            if decode:
                misses += len(missing)
            if previous[0] == pool - 1 and pool > 0:
                counts = together[pool - 1]
                if decode:
                    score = counts[previous[1]].sum(axis=0)
                    score[list(maps.resident[pool])] = -1.0
                    order = np.argsort(-score, kind="stable")
                    for budget in budgets:
                        guess = [int(e) for e in order[:budget] if score[e] > 0]
                        guessed[budget] += len(guess)
                        useful[budget] += len(missing & set(guess))
                counts[np.ix_(previous[1], experts)] += 1.0
            maps.feed(pool, experts, step=row + 1, phase=int(not decode))
            previous = (pool, experts)
    return [
        {
            "trace": Path(trace.name).stem,
            "slots": f"{share:.0%}",
            "budget": budget,
            "misses": misses,
            "useful": useful[budget] / max(1, guessed[budget]),
            "covered": useful[budget] / max(1, misses),
            "extra": (guessed[budget] - useful[budget]) / max(1, misses),
        }
        for budget in budgets
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--slots", default="10%,25%,50%")
    parser.add_argument("--budgets", default="1,2,4")
    parser.add_argument("--policy")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    budgets = [int(b) for b in args.budgets.split(",")]
    rows = [
        row
        for path in args.traces
        for share in args.slots.split(",")
        for row in study(Trace.load(path), float(share.rstrip("%")) / 100, budgets, args.policy)
    ]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'trace':24} {'slots':>5} {'budget':>6} {'misses':>7} {'useful':>7} {'covered':>8} {'extra':>7}")
    for r in rows:
        print(
            f"{r['trace']:24} {r['slots']:>5} {r['budget']:>6} {r['misses']:>7} {r['useful']:>7.1%} {r['covered']:>8.1%} "
            f"{r['extra']:>7.0%}"
        )


if __name__ == "__main__":
    main()
