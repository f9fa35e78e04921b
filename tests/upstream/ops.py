"""Upstream's test-backend-ops for the operations that the remap is made of, on the CPU and on the simulated device."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from .build import Trees
from .section import Section, call

OPS = ("MUL_MAT_ID", "GET_ROWS", "ADD_ID")
# Left out: matrices of a hundred million weights and more, which take minutes each to quantise on one thread.
SELECT = r"^(?!.*(n_mats=(128|512|1024),|m=2880,)).*"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
CASE = re.compile(r"^\s*(\w+)\((.*)\): ?(.*?)\s*$")


@dataclass
class Outcome:
    """What test-backend-ops said about one device."""

    counts: Counter[tuple[str, str]]  # (operation, "OK" | "not supported" | "skipping" | "FAIL")
    failed: list[str]
    header: str
    passed: tuple[int, int]


def parse(output: str, device: str) -> Outcome:
    """Read the console output for one device."""
    counts: Counter[tuple[str, str]] = Counter()
    failed: list[str] = []
    header, passed = "", (0, 0)
    inside = False
    for line in ANSI.sub("", output).splitlines():
        if line.startswith("Backend "):
            inside = f": {device}" in line and "Skipping" not in line
            header = line if inside else header
        elif not inside:
            continue
        elif case := CASE.match(line):
            verdict = next((v for v in ("not supported", "skipping") if v in case[3]), "OK" if case[3].endswith("OK") else "FAIL")
            counts[case[1], verdict] += 1
            if verdict == "FAIL":
                failed.append(line.strip())
        elif found := re.match(r"\s*(\d+)/(\d+) tests passed", line):
            passed = (int(found[1]), int(found[2]))
    return Outcome(counts, failed, header, passed)


def check_ops(trees: Trees) -> Section:
    """Run the cases of `OPS` on both devices. SIM0 is compared with the CPU, the CPU with its reference kernels."""
    section = Section("test-backend-ops on the CPU and on the simulated device")
    module = trees.patched / "libhotmoe-sim.so"
    totals = []
    for device in ("CPU", "SIM0"):
        command = [trees.patched / "test-backend-ops", "test", "-o", ",".join(OPS), "-p", SELECT, "-b", device]
        # threads that wait for work must not take the cores of those that have some
        result = call(command, GGML_BACKEND_PATH=str(module), OMP_WAIT_POLICY="passive")
        outcome = parse(result.stdout, device)
        section.lines.append(f"  {outcome.header.strip() or device + ': not found'}")
        for op in OPS:
            ok, unsupported, bad = (outcome.counts[op, verdict] for verdict in ("OK", "not supported", "FAIL"))
            section.lines.append(f"  {device:5s} {op:11s} {ok:5d} ok  {unsupported:4d} not supported  {bad:3d} failed")
            if ok == 0:
                section.failures.append(f"{op} did not run on {device}")
        section.failures += [f"{device}: {line}" for line in outcome.failed]
        n_ok = sum(n for (_, verdict), n in outcome.counts.items() if verdict == "OK")
        if result.returncode != 0 or outcome.passed[0] != outcome.passed[1] or outcome.passed[0] != n_ok:
            tail = " / ".join((result.stdout + result.stderr).strip().splitlines()[-3:])
            section.failures.append(f"{device}: exit code {result.returncode}, {outcome.passed} passed, {n_ok} seen: {tail}")
        totals.append(f"{device} {n_ok} ok")
    section.summary = ", ".join(totals) + f" ({', '.join(OPS)})"
    return section
