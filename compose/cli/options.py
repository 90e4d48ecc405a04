"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compose.cli import target

if TYPE_CHECKING:
    from compose.cli.client import Client

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of the API; LINGBOT_URL, then the platform of this folder.")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="API key; LINGBOT_KEY, then the development key of this folder.")
]
StateOption = Annotated[Path, typer.Option("--state", help="Folder with the platform's files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]


@contextmanager
def connected(url: str | None, key: str | None) -> Iterator[Client]:
    """A client of the API that the options name. Raises NoTarget."""
    from compose.cli.client import Client

    with Client(target.find(url, key)) as client:
        yield client
