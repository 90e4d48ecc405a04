"""The table of what the faults showed: each row from this run's own tests.

A test says its row by `figures`; whether it holds is the test's outcome. `make faults` writes the table into
docs/faults.md.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import psutil
import pytest

HEAD = """# What it survives

Made by `make faults` ({machine}). Each row is a test in `tests/faults`, run against real servers and real processes;
its figures are those of this run. `tests/faults/checker.py` says what is checked of every job: one terminal state,
one terminal entry, a stream that is contiguous by its own positions and whole by its own digests, on the scripted
engine equal to the text of an uninterrupted run, the client's text equal to the stream's, and usage settled once.

"""


class Row(NamedTuple):
    """One fault and what it showed."""

    fault: str
    figures: str
    outcome: str


class Collector:
    """A pytest plugin that gathers the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = dict(report.user_properties)
        if report.when == "call" and "fault" in told:
            self.rows.append(Row(str(told["fault"]), str(told.get("figures", "")), _outcome(report)))
        elif report.when == "setup" and report.skipped and isinstance(report.longrepr, tuple):
            self.rows.append(Row(report.nodeid.rpartition("::")[2], report.longrepr[2], "skipped"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.rows:
            terminalreporter.section("faults")
            terminalreporter.write_line(table(self.rows))


def _outcome(report: pytest.TestReport) -> str:
    return {"passed": "holds", "failed": "FAILS"}.get(report.outcome, report.outcome)


def table(rows: Sequence[Row]) -> str:
    head = "| fault | seen | |\n|---|---|---|\n"
    return head + "".join(f"| {row.fault} | {row.figures} | {row.outcome} |\n" for row in rows)


def page(rows: Sequence[Row]) -> str:
    return HEAD.format(machine=_machine()) + table(rows)


def _machine() -> str:
    memory_gb = psutil.virtual_memory().total / 2**30
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{psutil.cpu_count()} cores, {memory_gb:.0f} GiB, Python {platform.python_version()}, {when}"


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank; 0 of nothing."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * percent // 100) - 1)] if ranked else 0.0
