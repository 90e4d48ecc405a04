"""A store that comes back without its last seconds: the reader is ahead of it, and must not be told two stories."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from brokers import calls, connect
from brokers.chunk_reader import ChunkReader
from brokers.errors import StreamGone
from brokers.job import Content, Control, Entry, Job
from brokers.settings import Settings
from brokers.store import Store
from compose.servers import Valkey
from tests.integration.test_streams import DONE, Writing, collect, queued, reader, store, text_of, writing

__all__ = ["reader", "store", "writing"]


class Reading:
    """Reads in the background and can be asked how far it is."""

    def __init__(self, reader: ChunkReader, job: Job) -> None:
        self.found: list[Entry] = []
        self._task = asyncio.create_task(self._read(reader, job))

    async def _read(self, reader: ChunkReader, job: Job) -> None:
        async for entry in reader.tail(job):
            self.found.append(entry)

    async def until(self, pos: int) -> None:
        async with asyncio.timeout(10):
            while not any(isinstance(entry, Content) and entry.pos >= pos for entry in self.found):
                await asyncio.sleep(0.01)

    async def end(self) -> list[Entry]:
        async with asyncio.timeout(15):
            await self._task
        return self.found


def restarts(found: list[Entry]) -> list[int]:
    """Where in what was read the text began anew."""
    return [n for n, entry in enumerate(found) if isinstance(entry, Control) and entry.kind == "restarted"]


async def lose(store: Store, writing: Writing, settings: Settings, job: Job) -> Job:
    """The record and stream are gone; a worker makes them anew from its message."""
    keys = calls.keys(job, settings.partitions)
    connect.send(writing.writer.client, calls.Call(("DEL", keys.record, keys.stream), bool))
    await asyncio.sleep(1.2)  # the reader has seen it
    await store.create(job, b"")
    return job


async def test_a_reader_goes_on_where_the_same_text_passes_it(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    first = writing.own(job)
    reading = Reading(reader, job)
    writing.push(first, "abcdefghij")
    await reading.until(10)
    await lose(store, writing, settings, job)
    second = writing.own(job, "two")
    for part in ("abc", "defghijk", "lmn"):  # other chunks, the same text
        writing.push(second, part)
        await asyncio.sleep(0.05)
    writing.push(second, "", DONE)
    found = await reading.end()
    assert restarts(found) == []
    assert text_of(found) == "abcdefghijklmn"


async def test_a_reader_is_told_that_another_text_began(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    first = writing.own(job)
    reading = Reading(reader, job)
    writing.push(first, "abcdefghij")
    await reading.until(10)
    await lose(store, writing, settings, job)
    second = writing.own(job, "two")
    writing.push(second, "abcdeXXXXXXX")
    await asyncio.sleep(0.1)
    writing.push(second, "YZ", DONE)
    found = await reading.end()
    (restart,) = restarts(found)
    assert text_of(found[:restart]) == "abcdefghij"
    assert text_of(found[restart:]) == "abcdeXXXXXXXYZ"


async def test_a_reader_is_told_of_another_text_that_ended_before_it(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    first = writing.own(job)
    reading = Reading(reader, job)
    writing.push(first, "abcdefghij")
    await reading.until(10)
    await lose(store, writing, settings, job)
    writing.push(writing.own(job, "two"), "abcX", DONE)
    found = await reading.end()
    (restart,) = restarts(found)
    assert text_of(found[restart:]) == "abcX"


@pytest.mark.parametrize(("text", "restarted"), [("abcdefghij", False), ("abcdefghiX", True)])
async def test_an_end_at_the_readers_own_position_is_compared(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings, text: str, restarted: bool
) -> None:
    job = await queued(store, settings)
    first = writing.own(job)
    reading = Reading(reader, job)
    writing.push(first, "abcdefghij")
    await reading.until(10)
    await lose(store, writing, settings, job)
    writing.push(writing.own(job, "two"), text, DONE)
    found = await reading.end()
    assert bool(restarts(found)) is restarted
    assert text_of(found).endswith(text)
    assert isinstance(found[-1], Control)
    assert found[-1].kind == "end"


@pytest.mark.parametrize(("text", "told"), [("abcdefghijKL", "KL"), ("abc", "restarted abc")])
async def test_a_new_reader_may_be_ahead_of_a_stream_that_lost_text(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings, text: str, told: str
) -> None:
    """It read 10 tokens through another process, so there is nothing to compare but the length."""
    job = await queued(store, settings)
    reading = asyncio.create_task(collect(reader, job, after=10))
    await asyncio.sleep(1.2)
    writing.push(writing.own(job), text, DONE)
    found = await reading
    assert "restarted " * len(restarts(found)) + text_of(found) == told


class _LosesOnceMore(ChunkReader):
    """Its store forgets what is just compared, once."""

    def __init__(self, settings: Settings, lose: Callable[[], None]) -> None:
        super().__init__(settings)
        self._lose: Callable[[], None] | None = lose

    async def _digest_at(self, stream: str, pos: int) -> str | None:
        if lose := self._lose:
            self._lose = None
            lose()
        return await super()._digest_at(stream, pos)


async def test_text_that_is_lost_again_while_it_is_compared_is_waited_for(
    store: Store, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    keys = calls.keys(job, settings.partitions)
    delete = calls.Call(("DEL", keys.record, keys.stream), bool)
    reader = _LosesOnceMore(settings, lambda: connect.send(writing.writer.client, delete))
    reading = Reading(reader, job)
    writing.push(writing.own(job), "abcdefghij")
    await reading.until(10)
    await lose(store, writing, settings, job)
    writing.push(writing.own(job, "two"), "abcdefghijkl")
    await asyncio.sleep(1)
    await store.create(job, b"")
    writing.push(writing.own(job, "three"), "abcdefghijklmn", DONE)
    found = await reading.end()
    await reader.close()
    assert restarts(found) == []
    assert text_of(found) == "abcdefghijklmn"


async def test_a_lost_stream_that_nobody_makes_again_is_gone_at_last(store: Store, settings: Settings) -> None:
    impatient = ChunkReader(settings.model_copy(update={"rebuild_grace_s": 1.5}))
    job = await queued(store, settings)
    reading = Reading(impatient, job)
    await asyncio.sleep(0.2)
    with connect.blocking(settings, settings.region, timeout_s=5) as client:
        keys = calls.keys(job, settings.partitions)
        connect.send(client, calls.Call(("DEL", keys.record, keys.stream), bool))
    lost_at = time.monotonic()
    with pytest.raises(StreamGone):
        await reading.end()
    assert 1.4 <= time.monotonic() - lost_at <= 4
    await impatient.close()


@pytest.fixture
async def cut_store(own_store: tuple[Valkey, Settings]) -> AsyncIterator[Store]:
    store = Store(own_store[1])
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def own_store(settings: Settings, tmp_path: Path) -> Iterator[tuple[Valkey, Settings]]:
    with Valkey(tmp_path / "valkey") as valkey:
        here = settings.here.model_copy(update={"redis": type(settings.here.redis)(valkey.url)})
        yield valkey, settings.model_copy(update={"regions": {settings.region: here}})


async def test_a_cut_append_only_file_costs_the_reader_nothing(
    own_store: tuple[Valkey, Settings], cut_store: Store
) -> None:
    """The server is killed and its file loses all but the job's first chunks; the owner writes them again."""
    valkey, settings = own_store
    reader, writing = ChunkReader(settings), Writing(settings)
    job = await queued(cut_store, settings)
    stream = writing.own(job)
    reading = Reading(reader, job)
    writing.push(stream, "abcdefgh")
    await reading.until(8)
    (file,) = (valkey.folder / "data" / "appendonlydir").glob("*.incr.aof")
    kept = file.stat().st_size
    writing.push(stream, "ijklmnop")
    await reading.until(16)
    valkey.kill()
    with file.open("r+b") as data:
        data.truncate(kept)
    valkey.start()
    writing.push(stream, "qrstuvwx", DONE)
    found = await reading.end()
    assert restarts(found) == []
    assert text_of(found) == "abcdefghijklmnopqrstuvwx"
    writing.writer.close()
    await reader.close()
