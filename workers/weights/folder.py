"""A model's folder in the origin appears whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from brokers.errors import ConfigurationError
from brokers.models import CARD, Card

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}\Z")


def check_name(name: str) -> None:
    """A name is part of queue names, routing keys and paths. Raises ConfigurationError."""
    if not _NAME.match(name):
        raise ConfigurationError(
            f"{name[:80]!r} is no model name",
            hint="Use a-z, 0-9, '.' and '-', starting with a letter or a digit, 64 characters at most.",
        )


@contextmanager
def new_folder(models_dir: Path, name: str) -> Iterator[Path]:
    """A folder to fill, which becomes <models_dir>/<name> when the block ends well, and vanishes when it does not.

    It is filled under a hidden name on the same file system, brought to disk, and renamed. An older folder of that
    name is set aside in between: for that moment the model is missing, but never half there.
    """
    models_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=models_dir))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        _sync(fresh)
        target = models_dir / name
        if target.exists():
            target.rename(scratch / "old")
        fresh.rename(target)
        _sync_path(models_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_card(folder: Path, card: Card) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(card), indent=2)
    (folder / CARD).write_bytes(encoded + b"\n")


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)  # some writers leave 0600, but mirrors and workers may be other users
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
