"""Says at the end of a test run by which rule the goldens judged."""

from __future__ import annotations

import pytest

RULES: dict[str, list[str]] = {}
"""Rule -> the goldens that it was applied to in this session."""


@pytest.fixture(scope="session")
def rules() -> dict[str, list[str]]:
    return RULES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for rule, names in RULES.items():
        terminalreporter.write_line(f"goldens judged by: {rule} ({', '.join(names)})")
