"""How far each job's text was shown, so that `lingbot tail` goes on from there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from compose.cli.target import state_dir

_SAVE_EVERY_S = 0.5
_KEEP_S = 7 * 24 * 3600


class Cursor:
    """The position of one job, saved now and then while it moves and when it is closed."""

    def __init__(self, job_id: str, folder: Path | None = None) -> None:
        self._path = (folder or state_dir() / "cursors") / Path(job_id).name
        self.position = self._load()
        self._saved = (self.position, time.monotonic())

    def move(self, position: int) -> None:
        self.position = position
        if time.monotonic() - self._saved[1] > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        if self.position == self._saved[0] and self._path.exists():
            return
        # A folder that cannot be written costs the memory of the place, never the text.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(f"{self.position}\n")
        self._saved = (self.position, time.monotonic())

    def forget_old(self) -> None:
        """Drop the cursors of jobs nobody looked at for a week: their streams are gone."""
        oldest = time.time() - _KEEP_S
        with contextlib.suppress(OSError):
            for path in self._path.parent.iterdir():
                if path.stat().st_mtime < oldest:
                    path.unlink(missing_ok=True)

    def _load(self) -> int:
        try:
            return max(0, int(self._path.read_text()))
        except (OSError, ValueError):
            return 0
