"""Drives an engine by hand, whether it works in step() or by itself between two of them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from tests.unit.engine.driving import Record
from workers.engine.protocol import Engine, Request

_PATIENCE_S = 60.0


class Driver:
    """One engine, and what came of each of its sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.record = Record()
        self._live: set[str] = set()
        self._paused: set[str] = set()

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self._live.add(request.seq)
            self.engine.submit(request)

    def pause(self, seq: str) -> None:
        self._paused.add(seq)
        self.engine.pause(seq)

    def resume(self, seq: str) -> None:
        self._paused.discard(seq)
        self.engine.resume(seq)

    def step(self) -> None:
        self.record.take(self.engine.step())
        self._live -= self.record.ends.keys()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it does not come to that"
            if self.engine.idle and self.engine.ready_fd is not None:
                select.select([self.engine.ready_fd], [], [], 0.1)
            self.step()

    def until_tokens(self, seq: str, count: int) -> None:
        self.until(lambda: len(self.record.tokens.get(seq, [])) >= count)

    def drain(self) -> Record:
        """Until all that is not paused has ended, and the engine has come to rest."""
        self.until(lambda: self._live <= self._paused and self.engine.idle)
        return self.record

    def run(self, *requests: Request) -> Record:
        self.submit(*requests)
        return self.drain()

    def clear(self) -> None:
        """End what a test left behind."""
        for seq in tuple(self._live):
            self.engine.abort(seq)
        self._paused.clear()
        self.drain()
