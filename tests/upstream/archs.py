"""Upstream's test-llama-archs, patched to give every MoE architecture a pool (test-llama-archs.patch)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .build import Trees
from .section import Section, call

N_EXPERT, N_USED = 16, 2  # as in the patch
# (slots per layer, tokens per ubatch): the smallest pool of decode, a small one for two tokens, and one that holds all
RUNS = ((2, 1), (4, 2), (16, 64))
SEED = "1"

# Architectures of upstream's list whose graphs have no expert matmul, and why.
NOT_POOLED = {
    "ernie4_5": "dense: no expert tensors are loaded (ernie4_5-moe is the one with experts)",
    "paddleocr": "dense: no expert tensors are loaded",
    "refact": "expert tensors are loaded, but upstream's graph runs the dense FFN only",
}


@dataclass(frozen=True)
class Row:
    """What one architecture did in one run; counters over the context whose logits were compared."""

    arch: str
    verdict: str  # "ok", "failed", "skipped"
    equal: str  # "equal", "differs", "-"
    roundtrip: str
    n_pooled: int
    n_left_out: int
    events: int
    hits: int
    misses: int
    evictions: int
    bypassed: int
    why: str


def parse(output: str) -> list[Row]:
    """Read the lines that the patch adds."""
    rows = []
    for line in output.splitlines():
        if found := re.search(r"pool\|(.*)$", line):
            cells = found[1].split("|", 11)
            rows.append(Row(*cells[:4], *(int(cell) for cell in cells[4:11]), cells[11]))
    return rows


def check_archs(trees: Trees) -> Section:
    """Run all architectures at every size of `RUNS`."""
    section = Section("test-llama-archs with a pool: 16 experts, 2 per token, compared with the same context fully offloaded")
    by_arch: dict[str, list[Row]] = {}
    for slots, ubatch in RUNS:
        command = [trees.patched / "test-llama-archs", "--pool", str(slots), "--ubatch", str(ubatch), "-s", SEED]
        result = call(command)
        for row in parse(result.stdout):
            by_arch.setdefault(row.arch, []).append(row)
        if result.returncode not in (0, 1):
            tail = " / ".join((result.stdout + result.stderr).strip().splitlines()[-4:])
            section.failures.append(f"{slots} slots, ubatch {ubatch}: exit code {result.returncode}: {tail}")

    counts = {"equal": 0, "not pooled": 0, "skipped by upstream": 0}
    header = " | ".join(f"{slots} slots, ubatch {ubatch}".center(22) for slots, ubatch in RUNS)
    section.lines += [f"  {'':18s} {header}", f"  {'':18s} " + " | ".join("hit/miss/evicted".center(22) for _ in RUNS)]
    for arch, rows in by_arch.items():
        state = judge(arch, rows, section)
        counts[state] = counts.get(state, 0) + 1
        cells = " | ".join(f"{row.hits}/{row.misses}/{row.evictions}".center(22) for row in rows)
        reason = f": {NOT_POOLED[arch]}" if state == "not pooled" else ""
        section.lines.append(f"  {arch:18s} {cells}  {state}{reason}")
    section.summary = f"{len(by_arch)} MoE architectures: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    if not counts["equal"]:
        section.failures.append("no architecture was compared")
    return section


def judge(arch: str, rows: list[Row], section: Section) -> str:
    """Return the state of an architecture, and add what is wrong with it."""
    if all(row.verdict == "skipped" for row in rows):
        return "skipped by upstream"
    if arch in NOT_POOLED and all(row.equal == "equal" and row.events == row.bypassed == 0 for row in rows):
        return "not pooled"
    if len(rows) == len(RUNS) and all(row.verdict == "ok" and row.equal == "equal" and row.events > 0 for row in rows):
        return "equal"
    for row, (slots, ubatch) in zip(rows, RUNS, strict=False):
        if row.verdict != "ok" or row.equal != "equal" or row.events == 0:
            section.failures.append(f"{arch}, {slots} slots, ubatch {ubatch}: {row}")
    if len(rows) != len(RUNS):
        section.failures.append(f"{arch}: ran {len(rows)} of {len(RUNS)} times")
    return "FAILED"
