"""The table that the docs carry."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import NamedTuple

import psutil


class Row(NamedTuple):
    """One figure: ours, the reference's of the same run, their ratio, and what the reference is."""

    what: str
    ours: str
    reference: str
    ratio: str
    against: str


def table(rows: list[Row]) -> str:
    head = "| what | Lingbot | reference | ratio | the reference |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def machine() -> str:
    memory_gb = psutil.virtual_memory().total / 2**30
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{psutil.cpu_count()} cores, {memory_gb:.0f} GiB, Python {platform.python_version()}, {when}"
