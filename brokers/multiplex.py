"""One blocked XREAD that serves every reader of this process, where its streams share a slot.

A connection per reader costs a wake-up per reader and chunk (measured: p99 550 ms at 1,000 streams and 10k chunks/s,
against 25-42 ms multiplexed). A reader is added in mid-block by an entry in a wake stream of this process. A reader
that falls behind leaves the XREAD until it has taken what it was given, so that it costs no memory.

A store that comes back may have lost its last seconds. So whenever the connection was lost, and whenever a stream
stands before what was read of it, its readers are told to doubt: what comes next may contradict what came before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from brokers import connect, entries, pipeline
from brokers.errors import LingbotError, StreamGone
from brokers.job import State
from brokers.settings import Settings

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_CHECK_S = 1.0  # quiet streams are looked at this often: a blocked XREAD does not notice an expiry
_ENTRIES_EACH = 64  # per stream and read, so that a late reader's replay does not starve the others
_INBOX = 8  # reads a slow reader may be behind before it leaves the XREAD
_RETRY_S = 0.25  # from the second try on: the first may only find that a connection had died unused
_IDLE_S = 30.0  # a connection that nobody needs is closed then
_ALIVE = {State.ACCEPTED.value.encode(), State.QUEUED.value.encode(), State.RUNNING.value.encode(), None}


class Doubt(Enum):
    """What follows may not continue what came before."""

    DOUBT = 1


Found = list[entries.Row] | Doubt | LingbotError


@dataclass(eq=False)
class Tail:
    """One reader's place in one stream."""

    stream: str
    record: str
    last_id: str  # of what was put into the inbox
    settled: bool = False  # its job had ended when it was asked for
    inbox: asyncio.Queue[Found] = field(default_factory=asyncio.Queue)
    heard_at: float = 0.0  # when something came, or it was looked at (monotonic)
    missing_since: float | None = None
    doubted: bool = False  # told so since the last entries
    ended: bool = False  # the terminal entry is in the inbox

    @property
    def behind(self) -> bool:
        return self.inbox.qsize() >= _INBOX

    def give(self, found: list[entries.Row]) -> None:
        self.last_id = found[-1][0].decode()
        self.doubted, self.missing_since = False, None
        self.ended = _is_end(found[-1])
        self.inbox.put_nowait(found)

    def doubt(self) -> None:
        if not self.doubted:
            self.doubted = True
            self.inbox.put_nowait(Doubt.DOUBT)


class Multiplexer:
    """Reads any number of streams on one connection, as long as somebody wants them."""

    def __init__(self, settings: Settings, client: pipeline.Client, wake_key: str) -> None:
        self._settings = settings
        self._client = client
        self._line = pipeline.Line(client, wake_key)
        self._wake_key = wake_key
        self._wake_id = "0-0"
        self._tails: set[Tail] = set()
        self._changed = asyncio.Event()
        self._loop = asyncio.create_task(self._read_for_ever())
        self._waking: asyncio.Task[None] | None = None
        self._closing = False

    async def close(self) -> None:
        # The flag too: a cancel that meets redis-py in the middle of a read can be lost in it.
        self._closing = True
        self._changed.set()
        tasks = [task for task in (self._loop, self._waking) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._line.drop()

    @property
    def tails(self) -> frozenset[Tail]:
        return frozenset(self._tails)

    def add(self, tail: Tail) -> None:
        tail.heard_at = time.monotonic() - _CHECK_S  # a stream that is gone is told at once
        self._tails.add(tail)
        self.wake()

    def discard(self, tail: Tail) -> None:
        self._tails.discard(tail)

    def wake(self) -> None:
        """Read with what is asked for now: interrupt a block in progress."""
        self._changed.set()
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._send_wake())

    # --- reading ----------------------------------------------------------------------------------------------

    async def _read_for_ever(self) -> None:
        failures = 0
        while not self._closing:
            try:
                await self._read_once()
                failures = 0
            except connect.ERRORS as error:
                log.warning("reading streams: %s", type(error).__name__)
                failures += 1
            except Exception:
                log.exception("reading streams")
                failures += 1
            if failures:
                self._doubt_all()
                await asyncio.sleep(0 if failures == 1 else _RETRY_S)

    async def _wait_for_readers(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(_IDLE_S):
                await self._changed.wait()
        except TimeoutError:
            await self._line.drop()
            await self._changed.wait()

    async def _read_once(self) -> None:
        if not self._tails and not self._closing:
            await self._wait_for_readers()
        asked: dict[str, list[Tail]] = {}
        for tail in self._tails:
            if not tail.behind and not tail.ended:
                asked.setdefault(tail.stream, []).append(tail)
        # Who has just come is told at once when the stream is gone, not after a block.
        block_ms = 1 if _quiet(asked, time.monotonic()) else _BLOCK_MS
        for stream, found in (await self._xread(asked, block_ms)).items():
            _deliver(asked[stream], found)
        await self._check_quiet(asked)

    async def _xread(self, asked: dict[str, list[Tail]], block_ms: int) -> dict[str, list[entries.Row]]:
        # Readers of one stream at different places share a read from the earliest of them.
        from_ids = {key: min((t.last_id for t in tails), key=_order) for key, tails in asked.items()}
        command = ("XREAD", "COUNT", _ENTRIES_EACH, "BLOCK", block_ms, "STREAMS", self._wake_key, *from_ids)
        (reply,) = await self._ask([(*command, self._wake_id, *from_ids.values())])
        found = {key.decode(): entries.rows(raw) for key, raw in (reply or {}).items()}
        if woken := found.pop(self._wake_key, None):
            self._wake_id = woken[-1][0].decode()
        return found

    async def _ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        return await self._line.ask(commands, timeout_s=_BLOCK_MS / 1000 + self._settings.store_timeout_s)

    # --- what an XREAD does not tell --------------------------------------------------------------------------

    def _doubt_all(self) -> None:
        for tail in self._tails:
            tail.doubt()

    async def _check_quiet(self, asked: dict[str, list[Tail]]) -> None:
        """Look whether streams that say nothing are still there, and stand where they stood."""
        now = time.monotonic()
        if not (quiet := _quiet(asked, now)):
            return
        replies = await self._ask([("XREVRANGE", key, "+", "-", "COUNT", 1) for key in quiet])
        missing = []
        for tails, reply in zip(quiet.values(), replies, strict=True):
            for tail in tails:
                tail.heard_at = now
            if reply:
                for tail in tails:
                    _compare(tail, entries.rows(reply)[0])
            else:
                missing += tails
        if missing:
            await self._wait_for_rebuild(missing, now)

    async def _wait_for_rebuild(self, missing: list[Tail], now: float) -> None:
        """A lost record is made again from its message, so only one that has ended is gone at once."""
        states = await self._ask([("HGET", tail.record, "state") for tail in missing])
        for tail, state in zip(missing, states, strict=True):
            tail.doubt()
            tail.missing_since = tail.missing_since or now
            if tail.settled or state not in _ALIVE or now - tail.missing_since >= self._settings.rebuild_grace_s:
                self._tails.discard(tail)
                tail.inbox.put_nowait(StreamGone())

    async def _send_wake(self) -> None:
        """A lost wake costs one block, no more."""
        wake = ("XADD", self._wake_key, "MAXLEN", 1, "*", "w", "1")
        commands = [wake, ("PEXPIRE", self._wake_key, 60_000)]
        try:
            await pipeline.exchange(self._client, commands, timeout_s=self._settings.store_timeout_s)
        except connect.ERRORS as error:
            log.debug("wake: %s", type(error).__name__)


def _quiet(asked: dict[str, list[Tail]], now: float) -> dict[str, list[Tail]]:
    """The streams that a reader has heard nothing of for a while, or not yet."""
    return {key: tails for key, tails in asked.items() if min(t.heard_at for t in tails) + _CHECK_S <= now}


def _deliver(tails: list[Tail], found: list[entries.Row]) -> None:
    now = time.monotonic()
    for tail in tails:
        after = _order(tail.last_id)
        tail.heard_at = now
        if fresh := [row for row in found if _order(row[0].decode()) > after]:
            tail.give(fresh)


def _compare(tail: Tail, last: entries.Row) -> None:
    """A stream whose last entry the reader is past has lost some."""
    stands, reads = _order(last[0].decode()), _order(tail.last_id)
    if stands < reads or (stands == reads and _is_end(last)):  # an end that was read leaves nothing to ask for
        tail.doubt()
        tail.last_id = f"{reads[0]}-0"  # its control entries count anew
        if _is_end(last):
            tail.give([last])


def _is_end(row: entries.Row) -> bool:
    return row[1].get(b"k") == b"end"


def _order(entry_id: str) -> tuple[int, int]:
    pos, _, n = entry_id.partition("-")
    return int(pos), int(n)
