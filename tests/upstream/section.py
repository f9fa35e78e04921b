"""One part of the run: what it printed, and what went wrong."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Section:
    """One part.

    Attributes:
        title: What it is about.
        lines: Its table.
        failures: What differs or failed; empty if all is well.
        summary: One line for the end of the run.
        seconds: How long it took.
    """

    title: str
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    summary: str = ""
    seconds: float = 0.0


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without variables that change what ggml or llama.cpp do, and with ``extra``."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "LLAMA_"))} | extra


def call(command: list[str | Path], cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a clean environment and return its output, whatever its exit code."""
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(**extra), capture_output=True, text=True, errors="replace", check=False
    )
