"""Runs small things a little later, in one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Later(threading.Thread):
    """A timer for short delays; what it runs must not block. At most `most` wait: the first runs early for one more."""

    def __init__(self, most: int) -> None:
        super().__init__(name="later", daemon=True)
        self._most = most
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # equal times run in order, and functions need not compare
        self._changed = threading.Condition()

    def call(self, seconds: float, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))
            early = heapq.heappop(self._due)[2] if len(self._due) > self._most else None
            self._changed.notify()
        if early:
            _run(early)

    def flush(self) -> None:
        """Run everything now, in order."""
        with self._changed:
            due, self._due = sorted(self._due), []
        for _, _, action in due:
            _run(action)

    def run(self) -> None:
        while True:
            _run(self._next())

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while not self._due or self._due[0][0] > time.monotonic():
                self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
            return heapq.heappop(self._due)[2]


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.exception("a delayed action failed")
