"""Server-sent events: how a frame is written, and the answer that writes them.

Data is JSON on one line and ids are numbers, so nothing a model says can end a frame or forge another. Unicode's own
line ends are escaped too: several clients split a stream at them, though the standard does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.attendance import GoingAway, ReaderGone, attended
from producers.limits import RETRY_MS
from producers.platform import Platform
from producers.tails import Tails

_encoder = msgspec.json.Encoder()
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would hold frames back
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
_FAREWELL_S = 1.0

# Both are lines without the empty one that ends an event: some clients take a block without data for an event.
HEARTBEAT = b": still here\n"
RETRY = b"retry: %d\n" % RETRY_MS
DONE = b"data: [DONE]\n\n"


def event(name: str, data: object, cursor: int | None = None) -> bytes:
    """One event of the native stream; only an event with a cursor moves the client's Last-Event-ID."""
    head = b"" if cursor is None else b"id: %d\n" % cursor
    return b"%sevent: %s\ndata: %s\n\n" % (head, name.encode(), _line(data))


def data(value: object) -> bytes:
    """One frame of an OpenAI stream."""
    return b"data: %s\n\n" % _line(value)


def _line(value: object) -> bytes:
    line = _encoder.encode(value)
    for raw, escaped in _LINE_ENDS:
        line = line.replace(raw, escaped)
    return line


class EventStream(Response):
    """An answer that sends chunks of frames as they come, each chunk in one write.

    It ends when the frames do, or before: when the client is gone, or, with `farewell`, when this process is to end.
    Then `on_cut` is told. The streams behind the frames are let go in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        tails: Tails,
        frames: AsyncIterator[bytes],
        platform: Platform,
        *,
        farewell: bytes = RETRY,
        on_cut: Callable[[], None] = lambda: None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._tails = tails
        self._frames = frames
        self._platform = platform
        self._farewell = farewell
        self._on_cut = on_cut
        self.status_code = 200
        self.init_headers({**_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._platform.metrics.streams.track_inprogress():
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._attend(receive, send)
            finally:
                await self._tails.close()

    async def _attend(self, receive: Receive, send: Send) -> None:
        try:
            await attended(self._write(send), receive, self._platform)
        except ReaderGone:
            self._on_cut()
            return
        except GoingAway:
            self._on_cut()
            await self._say_farewell(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        async for chunk in self._frames:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _say_farewell(self, send: Send) -> None:
        with suppress(TimeoutError):  # a client that reads nothing does not hold the shutdown
            async with asyncio.timeout(_FAREWELL_S):
                await send({"type": "http.response.body", "body": self._farewell, "more_body": True})
