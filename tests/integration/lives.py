"""The life of jobs over any layout of the store: what test_cluster.py and test_sentinel.py both try."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pydantic import SecretStr

from brokers import calls, connect, names
from brokers.chunk_reader import ChunkReader
from brokers.job import Control, Entry, Job, State
from brokers.settings import Settings
from brokers.store import Store
from tests.integration.test_store import Writer, make_job
from tests.integration.test_streams import DONE, Writing, collect, queued, text_of


def at(settings: Settings, url: str) -> Settings:
    """The same platform on another store."""
    here = settings.here.model_copy(update={"redis": SecretStr(url)})
    return settings.model_copy(update={"regions": {settings.region: here}})


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[tuple[Store, ChunkReader]]:
    store, reader = Store(settings), ChunkReader(settings)
    await store.open()
    try:
        yield store, reader
    finally:
        await reader.close()
        await store.close()


async def a_whole_life(settings: Settings) -> None:
    """Jobs of every kind of end, spread over the partitions; each is listed, read back and accounted."""
    writing = Writing(settings)
    async with opened(settings) as (store, reader):
        jobs = [await queued(store, settings) for _ in range(20)]
        readings = [asyncio.create_task(collect(reader, job)) for job in jobs for _ in range(2)]
        streams = [writing.own(job) for job in jobs]
        for n in range(5):
            for stream in streams:
                writing.push(stream, str(n) * 8, DONE if n == 4 else None)
            await asyncio.sleep(0.01)
        found = await asyncio.gather(*readings)
        assert {text_of(one) for one in found} == {"".join(str(n) * 8 for n in range(5))}
        ended = [await store.get(job.id) for job in jobs]
        assert {(job.state, job.pos) for job in ended if job} == {(State.SUCCEEDED, 40)}
        assert await store.usage(jobs[0].tenant, "2000-01-01") == {}
    writing.writer.close()


async def a_job_is_listed_cancelled_and_erased(settings: Settings) -> None:
    async with opened(settings) as (store, _):
        jobs = []
        for _ in range(6):
            jobs.append(make_job(settings, tenant="lister"))
            await store.create(jobs[-1], b"")
            await asyncio.sleep(0.003)
        newest_first = [job.id for job in reversed(jobs)]
        assert [job.id for job in await store.list_jobs("lister", 10)] == newest_first
        assert await store.cancel(jobs[0]) is State.CANCELLED
        assert await store.withdraw(jobs[1]) is True
        assert await store.erase(jobs[2]) is State.ERASED
        gone = {jobs[1].id, jobs[2].id}
        assert [job.id for job in await store.list_jobs("lister", 10)] == [i for i in newest_first if i not in gone]


async def a_lost_job_is_found(settings: Settings) -> None:
    """What the reconciler and a second worker do when the first one falls silent; then its usage is settled."""
    async with opened(settings) as (store, _):
        job = await queued(store, settings)
        with connect.blocking(settings, settings.region, timeout_s=5) as client:
            writer = Writer(client, settings, job)
            assert isinstance(writer.claim(lease_ms=1), calls.Claimed)
            await asyncio.sleep(0.01)
            assert writer.reconcile() == calls.Publish(2, b"")
            assert isinstance(writer.claim(token="two", gen=2), calls.Claimed)
            assert writer.append(0, "ab", token="two") == calls.Accepted()
            assert writer.finish(2, token="two") == calls.Accepted()
            settle = writer.reconcile()
            assert isinstance(settle, calls.Settle)
            assert await store.durable(job) is True
            account = calls.account(job.id, job.home, settle, 3_600_000)
            assert [connect.send(client, account), connect.send(client, account)] == [True, False]
            assert connect.send(client, calls.settled(job.id, writer.keys)) is False
        day = time.strftime("%Y-%m-%d", time.gmtime(settle.ended_ms / 1000))
        assert (await store.usage(job.tenant, day))["completion_tokens"] >= 2


def cancels_are_heard(settings: Settings, jobs: Sequence[Job]) -> set[str]:
    """The ids heard on the hints' channel when jobs that run are cancelled, wherever they are kept."""
    heard: set[str] = set()
    with connect.blocking(settings, settings.region, timeout_s=2) as client:
        hints = connect.one_server(client).pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        hints.subscribe(names.hints(settings.region))
        hints.get_message(timeout=1)
        for job in jobs:
            connect.send(client, calls.cancel(job, calls.keys(job, settings.partitions)))
        deadline = time.monotonic() + 3
        while len(heard) < len(jobs) and time.monotonic() < deadline:
            if message := hints.get_message(timeout=0.5):
                heard.add(message["data"].decode())
        hints.close()
    return heard


class Dictation:
    """A worker that writes a known text to several streams at a steady pace, whatever the store does meanwhile."""

    def __init__(self, writing: Writing, jobs: Sequence[Job], tokens: int, pause_s: float) -> None:
        self.text = "".join(f"{n} " for n in range(tokens))[:tokens]
        self._writing = writing
        self._streams = [writing.own(job) for job in jobs]
        self._pause_s = pause_s
        self._thread = threading.Thread(target=self._push)

    def start(self) -> None:
        self._thread.start()

    def _push(self) -> None:
        for char in self.text:
            for stream in self._streams:
                self._writing.push(stream, char)
            time.sleep(self._pause_s)
        for stream in self._streams:
            self._writing.push(stream, "", DONE)

    async def written(self) -> None:
        await asyncio.to_thread(self._thread.join)


class Listener:
    """Reads one job, and notes when each entry came."""

    def __init__(self, reader: ChunkReader, job: Job) -> None:
        self.found: list[Entry] = []
        self.gaps_s: list[float] = []
        self._task = asyncio.create_task(self._listen(reader, job))

    async def _listen(self, reader: ChunkReader, job: Job) -> None:
        before = time.monotonic()
        async for entry in reader.tail(job):
            now = time.monotonic()
            self.gaps_s.append(now - before)
            before = now
            self.found.append(entry)

    async def text(self, timeout_s: float) -> str:
        """Raises AssertionError when anything was told twice over, or the end is missing."""
        async with asyncio.timeout(timeout_s):
            await self._task
        controls = [entry.kind for entry in self.found if isinstance(entry, Control)]
        assert controls[-1] == "end"
        assert "restarted" not in controls
        return text_of(self.found)
