"""The API's side of a job's stream: entries in order, from any position, whatever happens to the store meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator

from brokers import calls, connect, entries, names, pipeline
from brokers.cluster import AsyncCluster
from brokers.errors import LingbotError, StreamGap
from brokers.job import Content, Control, Entry, Job
from brokers.multiplex import Doubt, Multiplexer, Tail
from brokers.settings import Settings

log = logging.getLogger(__name__)

_RETRY_S = 0.25


class _Shorter(Exception):
    """The store has forgotten once more what was just read from it."""


class _Place:
    """How far one reader is."""

    def __init__(self, pos: int) -> None:
        self.pos = pos
        self.digest = "" if pos == 0 else None  # of the text up to here; None where the reader did not read it itself
        self.doubted = False
        self.again = False  # to be read anew from here

    def move_to(self, content: Content) -> None:
        self.pos, self.digest = content.pos, content.digest


class ChunkReader:
    """Reads streams of one region's home. Over a Cluster an XREAD serves one partition, else it serves all."""

    def __init__(self, settings: Settings, region: str | None = None) -> None:
        self._settings = settings
        self._region = region or settings.region
        self._client = connect.asynchronous(settings, self._region)
        self._sharded = isinstance(self._client, AsyncCluster)
        self._process = f"{os.getpid()}x{secrets.token_hex(4)}"
        self._multiplexers: dict[str, Multiplexer] = {}

    async def open(self) -> None:
        """Nothing is read before somebody asks for it."""

    async def close(self) -> None:
        await asyncio.gather(*(multiplexer.close() for multiplexer in self._multiplexers.values()))
        await self._client.aclose()

    @property
    def tails(self) -> int:
        return sum(len(multiplexer.tails) for multiplexer in self._multiplexers.values())

    async def tail(self, job: Job, after: int = 0) -> AsyncIterator[Entry]:
        """Entries beyond position `after`, in order, up to and including the terminal one.

        Content comes cut, so that its start is the last position yielded. Waits through an outage of the store, and
        for a stream that it lost. When text that was yielded has been generated anew and differs, a control entry
        `restarted` says so, and everything comes again from position 0. Raises StreamGone when the stream is no longer
        there, StreamGap when text before the next entry is missing.
        """
        async for batch in self.tail_batches(job, after):
            for entry in batch:
                yield entry

    async def tail_batches(self, job: Job, after: int = 0) -> AsyncIterator[list[Entry]]:
        """As `tail`, but everything that was ready at once in one list, for one write to the client."""
        multiplexer = self._multiplexer(job)
        place, tail = _Place(after), self._tail(job, after)
        multiplexer.add(tail)
        try:
            while True:
                batch = await self._next(multiplexer, tail, place)
                if batch and _is(batch[-1], "restarted"):
                    place = _Place(0)
                    place.again = True
                if place.again:
                    place.again = False
                    multiplexer.discard(tail)
                    tail = self._tail(job, place.pos)
                    multiplexer.add(tail)
                if batch:
                    yield batch
                    if _is(batch[-1], "end"):
                        return
        finally:
            multiplexer.discard(tail)

    async def _next(self, multiplexer: Multiplexer, tail: Tail, place: _Place) -> list[Entry]:
        """What is ready, up to the point from which it is to be read anew."""
        batch: list[Entry] = []
        for found in await _take(multiplexer, tail):
            if isinstance(found, Doubt):
                place.doubted = True
                continue
            for entry_id, raw in found:
                entry = entries.parse(entry_id, raw)
                if place.doubted and _tells(entry, place.pos):
                    try:
                        place.doubted = not await self._continues(tail.stream, place, entry)
                    except _Shorter:
                        place.again = True
                        return batch
                    if place.doubted:
                        log.warning("%s: its text differs from what was read before", tail.stream)
                        return [*batch, Control(pos=0, n=1, kind="restarted")]
                if fresh := _beyond(entry, place.pos):
                    batch.append(fresh)
                if isinstance(fresh, Content):
                    place.move_to(fresh)
        return batch

    # --- after the store lost something -----------------------------------------------------------------------

    async def _continues(self, stream: str, place: _Place, entry: Entry) -> bool:
        """Whether the text before `entry` is the text that was read. Raises _Shorter."""
        if isinstance(entry, Control):  # the end
            return entry.pos == place.pos and place.digest in (None, entry.data.get("digest", ""))
        if place.digest in (None, ""):
            return True  # nothing that could be compared
        while True:
            try:
                return await self._digest_at(stream, place.pos) == place.digest
            except connect.ERRORS as error:
                log.warning("comparing streams: %s", type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    async def _digest_at(self, stream: str, pos: int) -> str | None:
        """The digest of a stream's text up to a position; None when some of that text is gone. Raises _Shorter when the
        stream does not reach there, and ERRORS."""
        here = f"{pos}-0"
        (exact,) = await self._ask(("XRANGE", stream, here, here))
        if exact:
            return exact[0].digest
        before, behind = await self._ask(
            ("XRANGE", stream, "-", here), ("XRANGE", stream, f"({here}", "+", "COUNT", 64)
        )
        if not behind:
            raise _Shorter
        digest, reached = entries.Digest(), 0
        for content in [*before, *behind]:
            if content.start == reached < pos:
                digest.update(entries.head(content, min(pos, content.pos)))
                reached = min(pos, content.pos)
        return digest.hex() if reached == pos else None

    async def _ask(self, *commands: pipeline.Command) -> list[list[Content]]:
        """The content entries in each reply."""
        replies = await pipeline.exchange(self._client, commands, timeout_s=self._settings.store_timeout_s)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        parsed = [[entries.parse(*row) for row in entries.rows(reply)] for reply in replies]
        return [[entry for entry in found if isinstance(entry, Content)] for found in parsed]

    # --- places -----------------------------------------------------------------------------------------------

    def _tail(self, job: Job, after: int) -> Tail:
        keys = calls.keys(job, self._settings.partitions)
        return Tail(keys.stream, keys.record, f"{after}-0", settled=job.ended)

    def _multiplexer(self, job: Job) -> Multiplexer:
        part = names.partition(job.id, self._settings.partitions) if self._sharded else names.partition_at(0)
        if part not in self._multiplexers:
            wake_key = names.wake(self._region, part, self._process)
            self._multiplexers[part] = Multiplexer(self._settings, self._client, wake_key)
        return self._multiplexers[part]


async def _take(multiplexer: Multiplexer, tail: Tail) -> list[list[entries.Row] | Doubt]:
    """Everything that is ready for this reader, at least one thing."""
    found: list[list[entries.Row] | Doubt] = []
    while not found or not tail.inbox.empty():
        was_behind = tail.behind
        got = await tail.inbox.get()
        if was_behind and not tail.behind:
            multiplexer.wake()
        if isinstance(got, LingbotError):
            if found:  # first what came before it
                tail.inbox.put_nowait(got)
                break
            raise got
        found.append(got)
    return found


def _beyond(entry: Entry, pos: int) -> Entry | None:
    """The entry, cut to what lies beyond `pos`; None for what was read before. Raises StreamGap."""
    if isinstance(entry, Control):
        return entry
    if entry.pos <= pos:
        return None
    if entry.start > pos:
        raise StreamGap(f"The text between positions {pos} and {entry.start} is missing.")
    return entries.cut(entry, pos)


def _tells(entry: Entry, pos: int) -> bool:
    """Whether an entry decides if the stream still says what it said up to `pos`."""
    return entry.pos > pos if isinstance(entry, Content) else entry.kind == "end"


def _is(entry: Entry, kind: str) -> bool:
    return isinstance(entry, Control) and entry.kind == kind
