"""What `make test-upstream` concludes from the output of upstream's programs, which it cannot make fail itself."""

from __future__ import annotations

import pytest

from tests.upstream.archs import RUNS, Row, judge
from tests.upstream.archs import parse as parse_archs
from tests.upstream.ops import parse as parse_ops
from tests.upstream.section import Section

OK = "\x1b[1;32mOK\x1b[0m"
FAIL = "\x1b[1;31mFAIL\x1b[0m"
OPS_OUTPUT = f"""Testing 2 devices

Backend 1/2: CPU
  Skipping
Backend 2/2: SIM0
  Device description: simulated
  GET_ROWS(type=f32,n=1,m=8,r=2): {OK}
  GET_ROWS(type=nvfp4,n=1,m=8,r=2): not supported [SIM0]
  MUL_MAT_ID(type_a=f32,type_b=f32,n_mats=4): {OK}
  ADD_ID(type_a=f32,type_b=f32,n_embd=32): {OK}
  3/3 tests passed
  Backend SIM0: {OK}
2/2 backends passed
{OK}
"""


def test_ops_complete_report() -> None:
    outcome = parse_ops(OPS_OUTPUT, "SIM0")
    assert (outcome.n_ok, outcome.passed, outcome.problems()) == (3, (3, 3), [])
    assert outcome.counts["GET_ROWS", "not supported"] == 1


def test_ops_failed_case() -> None:
    failing = f"[ADD_ID] ERR = 1.0 > 0.1   ADD_ID(type_a=f32,type_b=f32,n_embd=32): {FAIL}"
    output = OPS_OUTPUT.replace(f"  ADD_ID(type_a=f32,type_b=f32,n_embd=32): {OK}", failing)
    output = output.replace("3/3", "2/3").replace(f"SIM0: {OK}", f"SIM0: {FAIL}")
    problems = parse_ops(output, "SIM0").problems()
    assert any("ERR = 1.0" in line for line in problems)
    assert "ADD_ID did not run on SIM0" in problems


@pytest.mark.parametrize(
    "output",
    [
        "",
        OPS_OUTPUT.replace("SIM0", "GPU0"),
        OPS_OUTPUT[: OPS_OUTPUT.index("3/3")],  # it crashed after the last case
        OPS_OUTPUT.replace("3/3", "4/4"),
        "\n".join(line for line in OPS_OUTPUT.splitlines() if "MUL_MAT_ID" not in line).replace("3/3", "2/2"),
    ],
    ids=["nothing", "no such device", "broken off", "cases unseen", "an operation is missing"],
)
def test_ops_incomplete_report(output: str) -> None:
    assert parse_ops(output, "SIM0").problems()


def rows_of(verdict: str, equal: str, events: int) -> list[Row]:
    line = f"pool|olmoe|{verdict}|{equal}|equal|2|0|{events}|5|3|1|0|"
    return parse_archs("\n".join([line] * len(RUNS)))


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        (rows_of("ok", "equal", 8), "equal"),
        (rows_of("failed", "differs", 8), "FAILED"),
        (rows_of("ok", "differs", 8), "FAILED"),
        (rows_of("ok", "equal", 0), "FAILED"),
        (rows_of("ok", "equal", 8)[:-1], "FAILED"),
    ],
    ids=["equal", "failed", "differs", "no event", "a run is missing"],
)
def test_archs(rows: list[Row], state: str) -> None:
    section = Section("archs")
    assert judge("olmoe", rows, section) == state
    assert bool(section.failures) == (state == "FAILED")
