"""Upstream's test-backend-ops for the operations that the remap is made of, on the CPU and on the simulated device."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .build import Trees
from .section import Section, call

OPS = ("MUL_MAT_ID", "GET_ROWS", "ADD_ID")
# Cases that are left out, by their parameters: tens of millions of weights and more, which upstream draws and quantises on
# one thread before it multiplies. All types are in what remains, and up to 1024 experts.
LEFT_OUT = {
    "n_mats=128,": "128 experts",
    "type_a=iq3_s,type_b=f32,n_mats=(512|1024),": "IQ3_S with 512 and 1024 experts (Q4_0 stays)",
    "m=2880,": "experts of gpt-oss's size",
    "m=1024,": "28 TQ1_0 experts of 1024 x 4096",
    "m=80000,": "GET_ROWS of 70,000 rows",
}
SELECT = f"^(?!.*({'|'.join(LEFT_OUT)})).*"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# what went wrong stands before the case, in the same line
CASE = re.compile(rf"(?:^|\s)({'|'.join(OPS)})\((type.*)\): ?(OK|FAIL|not supported|skipping)?")


@dataclass
class Outcome:
    """What test-backend-ops said about one device."""

    device: str
    header: str = ""  # empty: there is no such device
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by operation and verdict
    failed: list[str] = field(default_factory=list)
    passed: tuple[int, int] | None = None  # of how many; None: it did not come that far
    verdict: str = ""  # on the device

    @property
    def n_ok(self) -> int:
        return sum(n for (_, verdict), n in self.counts.items() if verdict == "OK")

    def problems(self) -> list[str]:
        """Return what is wrong: tests that failed, operations that did not run, a report that is not complete."""
        found = [f"{self.device}: {line}" for line in self.failed]
        found += [f"{op} did not run on {self.device}" for op in OPS if not self.counts[op, "OK"]]
        n_seen = self.n_ok + len(self.failed)
        if self.passed != (self.n_ok, n_seen):
            found.append(f"{self.device}: {self.n_ok} of {n_seen} cases are ok, test-backend-ops says {self.passed}")
        if self.verdict != "OK":
            found.append(f"{self.device}: test-backend-ops gives no OK, but {self.verdict or 'nothing'}")
        return found


def parse(output: str, device: str) -> Outcome:
    """Read the console output for one device."""
    outcome = Outcome(device)
    inside = False
    for line in ANSI.sub("", output).splitlines():
        if found := re.match(r"Backend \d+/\d+: (.*)", line):
            inside = found[1] == device
            outcome.header = line if inside else outcome.header
        elif not inside:
            continue
        elif case := CASE.search(line):
            verdict = case[3] or "FAIL"  # it broke off
            outcome.counts[case[1], verdict] += 1
            if verdict == "FAIL":
                outcome.failed.append(line.strip())
        elif found := re.match(r"\s*(\d+)/(\d+) tests passed", line):
            outcome.passed = (int(found[1]), int(found[2]))
        elif found := re.match(rf"\s+Backend {device}: (\w+)", line):
            outcome.verdict = found[1]
    return outcome


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
        section.lines.append(f"  {outcome.header or device + ': not found'}")
        for op in OPS:
            ok, unsupported, bad = (outcome.counts[op, verdict] for verdict in ("OK", "not supported", "FAIL"))
            section.lines.append(f"  {device:5s} {op:11s} {ok:5d} ok  {unsupported:4d} not supported  {bad:3d} failed")
        section.failures += outcome.problems()
        if result.returncode != 0:
            tail = " / ".join((result.stdout + result.stderr).strip().splitlines()[-3:])
            section.failures.append(f"{device}: exit code {result.returncode}: {tail}")
        totals.append(f"{device} {outcome.n_ok} ok")
    section.lines.append("  left out for their size: " + "; ".join(LEFT_OUT.values()))
    section.summary = ", ".join(totals) + f" ({', '.join(OPS)})"
    return section
