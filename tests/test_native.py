"""Tests of native code that are programs of their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

BUILD = Path(__file__).parent.parent / "build" / "bin"


def test_sim() -> None:
    """The simulated accelerator: memory, queues, events, strict modes, faults; see tests/native/test_sim.cpp."""
    program = BUILD / "test-sim"
    assert program.exists(), f"{program} is missing: run make test, or cmake --build build --target test-sim"
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    summary = re.search(r"(\d+) passed, 0 failed", result.stdout)
    assert summary, result.stdout[-3000:]
    assert int(summary[1]) > 100
