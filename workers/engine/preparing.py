"""Sequences whose guides are being made; the batch does not wait for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.engine.protocol import Request

if TYPE_CHECKING:
    from workers.engine.guide import Guide, GuideMaker


@dataclass(slots=True)
class Prepared:
    """A sequence whose guide is made, or cannot be: then `guide.result()` raises Fault."""

    request: Request
    guide: Future[Guide]
    paused: bool = False


class Preparing:
    """One thread owns it. Without a maker nothing comes here."""

    def __init__(self, maker: GuideMaker | None) -> None:
        self.ready_fd = maker.ready_fd if maker else None
        self._maker = maker
        self._all: dict[str, Prepared] = {}

    def __contains__(self, seq: str) -> bool:
        return seq in self._all

    def __iter__(self) -> Iterator[Request]:
        return (prepared.request for prepared in self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    @property
    def has_ready(self) -> bool:
        return any(prepared.guide.done() for prepared in self._all.values())

    def add(self, request: Request) -> bool:
        """False when it has nothing to wait for."""
        schema = request.sampling.json_schema
        if schema is None or self._maker is None:
            return False
        self._all[request.seq] = Prepared(request, self._maker.make(schema, request.output))
        return True

    def remove(self, seq: str) -> bool:
        """False when it is not here."""
        prepared = self._all.pop(seq, None)
        if prepared is not None:
            prepared.guide.cancel()
        return prepared is not None

    def pause(self, seq: str, *, paused: bool) -> None:
        if prepared := self._all.get(seq):
            prepared.paused = paused

    def take(self) -> list[Prepared]:
        """Those that are ready, in the order in which they came."""
        if self.ready_fd is None:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.ready_fd)  # first: what gets ready from here on makes it readable again
        ready = [prepared for prepared in self._all.values() if prepared.guide.done()]
        for prepared in ready:
            del self._all[prepared.request.seq]
        return ready
