"""Recorded routing of real models, for tests; see tests/traces/README.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "traces"
NAMES = sorted(path.stem for path in FOLDER.glob("*.csv"))


class Routing(NamedTuple):
    """A trace: events of (layer, step, ids); the prompt is step 1 of each layer, each token of decode a further one."""

    n_expert: int
    n_used: int
    n_layers: int
    events: list[tuple[int, int, list[int]]]


@cache
def routing(name: str) -> Routing:
    """Read a trace."""
    prompt: dict[int, list[int]] = {}
    decode: list[tuple[int, int, list[int]]] = []
    facts: dict[str, int] = {}
    steps: dict[str, int] = {}
    for line in (FOLDER / f"{name}.csv").read_text().splitlines():
        if line.startswith("# meta="):
            facts = {key: int(value) for key, value in (word.split("=") for word in line[7:].split() if word[:2] == "n_")}
        elif line and line[0] != "#" and not line.startswith("phase"):
            phase, token, layer, experts = line.split(",")
            ids = [int(e) for e in experts.split()]
            if phase == "decode":
                decode.append((int(layer), 2 + steps.setdefault(token, len(steps)), ids))
            else:
                prompt.setdefault(int(layer), []).extend(ids)
    n_layers = facts.get("n_layer") or facts["n_moe_layer"]
    return Routing(
        facts["n_expert"], facts["n_expert_used"], n_layers, [(layer, 1, ids) for layer, ids in prompt.items()] + decode
    )
