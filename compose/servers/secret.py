"""Secrets kept in files only their owner reads."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Make a folder, or take it, so that nobody else may enter; its absolute path."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)  # whoever made it may have made it for all
    return path.absolute()


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; at no time may another user read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


def kept(path: Path, make: Callable[[], str] = lambda: secrets.token_urlsafe(24)) -> str:
    """The secret in a file, made at the first call. Its alphabet needs no quoting in a URL."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        write_private(path, make() + "\n")
        return path.read_text().strip()
