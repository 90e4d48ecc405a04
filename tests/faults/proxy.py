"""A TCP proxy that misbehaves on order: between a process of ours and RabbitMQ, Redis or the API.

It runs in a thread of its own, so that it goes on while a test blocks. Orders hold for the connections there are and
for those to come, until `heal`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

_CHUNK = 64 * 1024
_IN_FLIGHT = 64  # chunks on their delayed way; more waits in the sender's socket

_OnItsWay = asyncio.Queue[tuple[float, bytes]]
"""Chunks of one direction, each with the time at which it arrives; an empty one is the end."""


class FaultProxy:
    """One listening port that leads to one target.

    `delay(s)` one way, both ways · `stall()` takes nothing and sends nothing, connections stay · `cut()` resets what
    is connected, once · `truncate(n)` lets n more bytes through, either way, then resets · `refuse()` resets whoever
    connects too · `heal()` ends all of it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay_s = 0.0
        self._refusing = False
        self._left: int | None = None  # bytes until the cut
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-to-{port}", daemon=True)
        self.port = 0
        self.carried = 0  # bytes

    def start(self) -> Self:
        self._thread.start()
        self.port = self._ask(self._listen())
        return self

    def stop(self) -> None:
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, real: str) -> str:
        """`real` with this proxy's address in place of its own."""
        parts = urlsplit(real)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    # --- faults -----------------------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        self._order(lambda: setattr(self, "_delay_s", seconds))

    def stall(self) -> None:
        self._order(self._flowing.clear)

    def cut(self) -> None:
        self._order(self._reset_all)

    def truncate(self, after_bytes: int) -> None:
        self._order(lambda: setattr(self, "_left", after_bytes))

    def refuse(self) -> None:
        self._order(self._refuse)

    def heal(self) -> None:
        self._order(self._heal)

    def _refuse(self) -> None:
        self._refusing = True
        self._reset_all()

    def _heal(self) -> None:
        self._delay_s, self._refusing, self._left = 0.0, False, None
        self._flowing.set()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()  # RST: what was on its way is lost, as when a cable is pulled

    # --- the thread -------------------------------------------------------------------------------------------

    def _order(self, act: Callable[[], object]) -> None:
        async def now() -> None:
            act()

        self._ask(now())

    def _ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        self._server.close()
        self._reset_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self._refusing:
                await self._join(reader, writer)
        except* OSError:
            pass  # either side is gone: so is the other now
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers.add(far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                for source, sink in ((reader, far_writer), (far_reader, writer)):
                    on_its_way: _OnItsWay = asyncio.Queue(_IN_FLIGHT)
                    group.create_task(self._take(source, on_its_way))
                    group.create_task(self._send(on_its_way, sink))
        finally:
            self._writers.discard(far_writer)
            far_writer.transport.abort()

    async def _take(self, reader: asyncio.StreamReader, on_its_way: _OnItsWay) -> None:
        chunk = b"first"
        while chunk:
            chunk = await reader.read(_CHUNK)
            await on_its_way.put((self._loop.time() + self._delay_s, chunk))

    async def _send(self, on_its_way: _OnItsWay, writer: asyncio.StreamWriter) -> None:
        while True:
            at, chunk = await on_its_way.get()
            await asyncio.sleep(at - self._loop.time())
            await self._flowing.wait()
            if not chunk:
                raise ConnectionResetError  # the other direction ends too
            writer.write(self._let_through(chunk))
            await writer.drain()
            if self._left == 0:
                self._left = None
                self._reset_all()

    def _let_through(self, chunk: bytes) -> bytes:
        if self._left is not None:
            chunk = chunk[: self._left]
            self._left -= len(chunk)
        self.carried += len(chunk)
        return chunk

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def to(url: str) -> FaultProxy:
    """A proxy that leads where `url` does; not started yet."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError("the URL names no host and port")
    return FaultProxy(parts.hostname, parts.port)
