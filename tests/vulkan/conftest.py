"""Prints at the end what the gates measured."""

from __future__ import annotations

import pytest

_facts: list[str] = []


@pytest.fixture(scope="session")
def facts() -> list[str]:
    return _facts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for fact in _facts:
        terminalreporter.write_line(fact)
