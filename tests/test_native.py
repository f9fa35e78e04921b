"""Tests of native code that are programs of their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parent.parent / "build" / "bin"


@pytest.mark.parametrize(
    ("name", "at_least"),
    [("test-sim", 160), ("test-slot-map", 120), ("test-store", 1700), ("test-feed", 800), ("test-host-memory", 35)],
)
def test_program(name: str, at_least: int) -> None:
    """Each prints a line for what failed and closes with its counts; see tests/native."""
    program = BUILD / name
    assert program.exists(), f"{program} is missing: run make test, or cmake --build build --target {name}"
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    summary = re.search(r"(\d+) passed, 0 failed", result.stdout)
    assert summary, result.stdout[-3000:]
    assert int(summary[1]) >= at_least
