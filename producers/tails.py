"""One consumer of several streams: what is ready leaves together, and silence has an end.

A task per stream moves entries into a bounded buffer. A blocked `anext` cannot be given a timeout (cancelling it ends
the generator), so the consumer waits for the buffer instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeGuard, cast

from brokers.job import Control, Entry

Entries = AsyncIterator[list[Entry]]

_MOST_BATCHES = 4  # waiting for a slow client; beyond them the reader behind us holds its own back


class Tails:
    """Entries of streams 0 .. n-1, as they come, until each has had its terminal one."""

    def __init__(self, sources: list[Entries]) -> None:
        self._sources = sources
        self._open = len(sources)
        self._buffer: deque[tuple[int, list[Entry]]] = deque()
        self._failure: BaseException | None = None
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._pumps = [asyncio.create_task(self._pump(i, source)) for i, source in enumerate(self._sources)]

    async def close(self) -> None:
        """Free every stream's tail."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def ended(self) -> bool:
        """True when every stream has ended and all of it was taken."""
        return not self._open and not self._buffer

    async def take(self, timeout_s: float) -> list[tuple[int, Entry]]:
        """All that is ready, waiting for it up to `timeout_s`; empty then. Raises StreamGone, StreamGap."""
        if not self._buffer and self._failure is None:
            await self._wait(timeout_s)
        if not self._buffer and self._failure is not None:
            raise self._failure
        taken = [(index, entry) for index, batch in self._buffer for entry in batch]
        self._buffer.clear()
        self._room.set()
        return taken

    async def _wait(self, timeout_s: float) -> None:
        self._ready.clear()
        alarm = asyncio.get_running_loop().call_later(timeout_s, self._ready.set)
        try:
            await self._ready.wait()
        finally:
            alarm.cancel()

    async def _pump(self, index: int, source: Entries) -> None:
        try:
            async for batch in source:
                while len(self._buffer) >= _MOST_BATCHES:
                    self._room.clear()
                    await self._room.wait()
                self._buffer.append((index, batch))
                if is_end(batch[-1]):
                    self._open -= 1
                self._ready.set()
        except Exception as error:
            self._failure = error  # told to the consumer once it has taken what came before
            raise
        finally:
            self._ready.set()
            await cast(AsyncGenerator[list[Entry], None], source).aclose()  # frees the tail now, not when collected


def is_end(entry: Entry) -> TypeGuard[Control]:
    return isinstance(entry, Control) and entry.kind == "end"
