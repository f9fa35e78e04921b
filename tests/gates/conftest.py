"""Counts the cells of the exactness matrix and says so at the end of the run."""

from __future__ import annotations

import pytest

_cells = [0]


@pytest.fixture(scope="session")
def cell_count() -> list[int]:
    return _cells


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _cells[0]:
        terminalreporter.write_line(f"exactness matrix: {_cells[0]} cells")
