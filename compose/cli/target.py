"""Which API the command talks to, and with which key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brokers.errors import LingbotError


class NoTarget(LingbotError):
    """No platform is known here."""

    code = "no_target"
    hint = "Start one with `lingbot up`, or give --url and --key (LINGBOT_URL and LINGBOT_KEY)."


@dataclass(frozen=True)
class Target:
    url: str
    key: str | None


def find(url: str | None = None, key: str | None = None) -> Target:
    """From the options, then the environment, then the nearest .lingbot. Raises NoTarget."""
    state = nearest_state()
    url = url or os.environ.get("LINGBOT_URL") or (_local_url(state) if state else None)
    if url is None:
        raise NoTarget
    key = key or os.environ.get("LINGBOT_KEY") or (_read(state / "dev.key") if state else None)
    return Target(url.rstrip("/"), key)


def nearest_state() -> Path | None:
    """The .lingbot folder of this directory or of one above it."""
    return next((path for path in _states() if path.is_dir()), None)


def state_dir() -> Path:
    """Where the command keeps what it remembers: beside the platform, else where the desktop standard says."""
    fallback = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "lingbot"
    return nearest_state() or fallback


def _states() -> Iterator[Path]:
    here = Path.cwd()
    return (folder / ".lingbot" for folder in (here, *here.parents))


def _local_url(state: Path) -> str | None:
    text = _read(state / "ports.json")
    port = json.loads(text).get("api") if text else None
    return f"http://127.0.0.1:{port}" if port else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
