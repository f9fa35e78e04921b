"""With no cache attached, the patched library builds the graphs, makes the splits and gives the bits of the unpatched one.

stock_probe.cpp does the work, compiled against either tree. It digests the scheduler's listing of every graph (nodes,
backends, splits and their inputs), the shape and parameters of every node, and all logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models import cached_model

from .build import Trees
from .section import Section, call

MODELS: dict[str, dict[str, Any]] = {
    "olmoe Q4_K": {"arch": "olmoe", "quant": "Q4_K"},
    "olmoe Q4_0": {"arch": "olmoe", "quant": "Q4_0"},  # repacked by the CPU
    "qwen3moe Q6_K, scales": {"arch": "qwen3moe", "quant": "Q6_K", "scales": True},
    "llama Q8_0": {"arch": "llama", "quant": "Q8_0"},
    "gpt-oss MXFP4, biases": {"arch": "gpt-oss", "quant": "MXFP4"},
    "deepseek2 Q4_K, fused": {"arch": "deepseek2", "quant": "Q4_K", "layout": "fused"},
    "gemma4 Q4_K, fused, scales": {"arch": "gemma4", "quant": "Q4_K", "scales": True},
    "grovemoe Q4_K, two banks": {"arch": "grovemoe", "quant": "Q4_K"},
    "nemotron_h_moe F16, recurrent": {"arch": "nemotron_h_moe", "quant": "F16"},
}
PLACEMENTS = ("cpu", "device", "cpu-moe")
DIGESTS = ("all_graphs", "last_graph", "shapes", "logits")

Rows = list[dict[str, Any]]


def probe(program: Path, model: Path, placement: str, dump: str = "-") -> Rows:
    """Run the probe; return one row per ubatch size.

    Raises:
        RuntimeError: It failed; the message has its last lines.
    """
    result = call([program, model, placement, dump])
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or len(rows) != 3:
        tail = "\n".join((result.stderr or result.stdout).splitlines()[-5:])
        raise RuntimeError(f"{program} {placement} exited {result.returncode}: {tail}")
    return rows


def differences(placement: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return what differs between stock (a) and ours (b) at one ubatch size, and what makes the comparison worthless."""
    # after a cache the graphs of its own time are gone: only the graph of the last ubatch is there on both sides
    keys = [key for key in DIGESTS if placement != "detached" or key != "all_graphs"]
    found = [key for key in (*keys, "nodes", "splits") if a[key] != b[key]]
    if placement != "cpu" and 0 in (a["kernels"], b["kernels"]):
        found.append("nothing ran on the simulated device")
    if placement == "detached" and b["pool_events"] == 0:
        found.append("the cache saw nothing before it was freed")
    return found


def compare(name: str, placement: str, stock: Rows, patched: Rows, section: Section) -> int:
    """Compare two runs and add a line; return how many ubatch sizes are equal."""
    verdicts = [differences(placement, a, b) for a, b in zip(stock, patched, strict=True)]
    n_equal = sum(not different for different in verdicts)
    splits = "/".join(str(row["splits"]) for row in patched)
    verdict = "equal" if n_equal == len(verdicts) else "DIFFERS"
    section.lines.append(f"  {name:30s} {placement:8s}  {patched[0]['nodes']:4d} nodes  {splits:8s} splits  {verdict}")
    for row, different in zip(patched, verdicts, strict=True):
        if different:
            section.failures.append(f"{name}, {placement}, ubatch {row['ubatch']}: {', '.join(different)}")
    return n_equal


def check_comparison(trees: Trees, model: Path, section: Section) -> None:
    """Verify that a cache would be noticed: with one attached, graphs and splits must differ from stock."""
    stock = probe(trees.stock / "stock-probe", model, "cpu-moe")
    attached = probe(trees.patched / "stock-probe", model, "attached")
    for a, b in zip(stock, attached, strict=True):
        if not {"all_graphs", "last_graph", "nodes", "splits"} <= set(differences("attached", a, b)):
            section.failures.append(
                f"the comparison is blind: it takes a graph with a cache for a stock graph (ubatch {b['ubatch']})"
            )


def check_stock(trees: Trees, results: Path) -> Section:
    """Compare both trees over all models and placements.

    Args:
        trees: Where the probes are.
        results: Folder for the listings of a model that differs.
    """
    section = Section("Pool off is stock: graphs, splits and logits of the unpatched and the patched library")
    cells = equal = 0
    for name, options in MODELS.items():
        model = cached_model(**options)
        for placement in (*PLACEMENTS, "detached"):
            # what a freed cache leaves behind is compared with stock, which never had one
            stock = probe(trees.stock / "stock-probe", model, "cpu-moe" if placement == "detached" else placement)
            patched = probe(trees.patched / "stock-probe", model, placement)
            n = compare(name, placement, stock, patched, section)
            cells, equal = cells + len(stock), equal + n
            if n < len(stock):
                keep_listings(trees, model, placement, results)
    check_comparison(trees, cached_model(**MODELS["olmoe Q4_K"]), section)
    section.summary = f"{equal} of {cells} cells equal ({len(MODELS)} models, 4 placements, ubatches 1, 8, 40)"
    return section


def keep_listings(trees: Trees, model: Path, placement: str, results: Path) -> None:
    """Write what both probes saw to files, for diff."""
    results.mkdir(parents=True, exist_ok=True)
    stem = results / f"{model.stem}-{placement}"
    probe(trees.stock / "stock-probe", model, "cpu-moe" if placement == "detached" else placement, f"{stem}.stock.txt")
    probe(trees.patched / "stock-probe", model, placement, f"{stem}.patched.txt")
