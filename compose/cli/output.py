"""What the command writes: results to stdout, remarks to stderr, errors as one line with a hint."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from brokers.errors import LingbotError

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 200  # what reads a pipe wants whole words, not an 80-column page
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@cache
def out() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


@cache
def err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def remark(text: str) -> None:
    """Something a person wants to know and a pipe does not."""
    err().print(text, style="dim", markup=False, soft_wrap=True)


def complain(error: LingbotError) -> None:
    from rich.text import Text

    err().print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.advice:
        remark(f"hint: {error.advice}")


def show_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The first column is what other commands ask for: it is never cut."""
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(str(cell)) for cell in row] for row in rows]  # as text: brackets are no markup
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(columns[0], no_wrap=True, min_width=max((row[0].cell_len for row in cells), default=0))
    for column in columns[1:]:
        table.add_column(column, no_wrap=True)
    for row in cells:
        table.add_row(*row)
    out().print(table)


def write_text(text: str) -> None:
    """A model's text, at once. A terminal gets no control characters: they could move its cursor, or do worse."""
    sys.stdout.write(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
