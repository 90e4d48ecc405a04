"""Chunks written by the worker's side, read by the API's side, over a real store."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from brokers import calls, connect, entries
from brokers.chunk_reader import ChunkReader
from brokers.chunk_writer import ChunkWriter, Outcome, OwnedStream, Pushed
from brokers.errors import StreamGap, StreamGone
from brokers.job import Content, Control, Entry, FinishReason, Job, State
from brokers.settings import Settings
from brokers.store import Store
from compose.servers import Valkey
from tests.integration.test_store import make_job

DONE = Outcome(State.SUCCEEDED, FinishReason.STOP)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    store = Store(settings)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def reader(settings: Settings) -> AsyncIterator[ChunkReader]:
    reader = ChunkReader(settings)
    await reader.open()
    yield reader
    await reader.close()


class Writing:
    """A worker that owns streams."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cancelled: list[str] = []
        self.writer = ChunkWriter(settings, settings.region, lambda stream: self.cancelled.append(stream.job.id))

    def own(self, job: Job, token: str = "one") -> OwnedStream:
        keys = calls.keys(job, self.settings.partitions)
        call = calls.claim(job, keys, worker="w", token=token, lease_ms=self.settings.lease_ms)
        claimed = connect.send(self.writer.client, call)
        assert isinstance(claimed, calls.Claimed)
        stream = OwnedStream(job, keys, token)
        self.writer.add(stream)
        return stream

    def push(self, stream: OwnedStream, text: str, outcome: Outcome | None = None) -> None:
        self.writer.push([Pushed(stream, [ord(char) for char in text], list(text), outcome)])


@pytest.fixture
def writing(settings: Settings) -> Iterator[Writing]:
    writing = Writing(settings)
    yield writing
    writing.writer.close()


async def queued(store: Store, settings: Settings) -> Job:
    job = make_job(settings)
    await store.create(job, b"")
    await store.queued(job)
    return job


async def collect(reader: ChunkReader, job: Job, after: int = 0) -> list[Entry]:
    async with asyncio.timeout(10):
        return [entry async for entry in reader.tail(job, after)]


async def rest(tail: AsyncIterator[Entry]) -> list[Entry]:
    async with asyncio.timeout(10):
        return [entry async for entry in tail]


def connections(writing: Writing) -> int:
    return int(connect.one_server(writing.writer.client).info("clients")["connected_clients"])


def send(writing: Writing, *command: str) -> None:
    connect.send(writing.writer.client, calls.Call(command, bool))


def text_of(found: list[Entry]) -> str:
    return "".join(entry.text for entry in found if isinstance(entry, Content))


async def test_a_reader_sees_exactly_what_was_written(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    reading = asyncio.create_task(collect(reader, job))
    stream = writing.own(job)
    text = "".join(f"wörd{n} 🦊 " for n in range(40))
    for char in text:
        writing.push(stream, char)
        await asyncio.sleep(0.0005)
    writing.push(stream, "", DONE)
    found = await reading
    assert text_of(found) == text
    contents = [entry for entry in found if isinstance(entry, Content)]
    assert [entry.start for entry in contents] == [0, *(entry.pos for entry in contents[:-1])]
    digest = entries.Digest()
    digest.update(text)
    assert contents[-1].digest == digest.hex()
    assert isinstance(found[-1], Control)
    assert found[-1].data["digest"] == digest.hex()


async def test_every_cursor_gives_exactly_the_rest(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    stream = writing.own(job)
    writing.push(stream, "abcdefghijklm")
    await asyncio.sleep(0.1)
    writing.push(stream, "nopqrstuvwxyz", DONE)
    assert stream.settled.wait(5)
    rests = [text_of(await collect(reader, job, after)) for after in range(27)]
    assert rests == ["abcdefghijklmnopqrstuvwxyz"[after:] for after in range(27)]


async def test_many_readers_share_one_connection(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    jobs = [await queued(store, settings) for _ in range(100)]
    streams = [writing.own(job) for job in jobs]
    before = connections(writing)
    tails = [reader.tail(job) for job in jobs for _ in range(3)]
    async with asyncio.timeout(10):
        await asyncio.gather(*map(anext, tails))  # each has read something
    assert connections(writing) <= before + 5  # of 300 readers: one that blocks, and some that wake it
    readings = [asyncio.create_task(rest(tail)) for tail in tails]
    for n in range(5):
        for stream in streams:
            writing.push(stream, str(n) * 8, DONE if n == 4 else None)
        await asyncio.sleep(0.01)
    found = await asyncio.gather(*readings)
    assert {text_of(one) for one in found} == {"".join(str(n) * 8 for n in range(5))}
    assert reader.tails == 0


async def test_a_quiet_stream_is_read_for_as_long_as_it_takes_and_a_cancelled_read_spoils_no_other(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    quiet, other = await queued(store, settings), await queued(store, settings)
    reading = asyncio.create_task(collect(reader, quiet))
    cancelled = [asyncio.create_task(collect(reader, job)) for job in (quiet, other) for _ in range(3)]
    await asyncio.sleep(settings.store_timeout_s + 1.5)  # longer than a block, and than any other call may take
    for task in cancelled:  # in the middle of a read
        task.cancel()
    after = asyncio.create_task(collect(reader, other))
    writing.push(writing.own(quiet), "at last", DONE)
    writing.push(writing.own(other), "another", DONE)
    assert (text_of(await reading), text_of(await after)) == ("at last", "another")


async def test_a_reader_that_does_not_read_holds_up_nobody_and_little(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    slow_job, job = await queued(store, settings), await queued(store, settings)
    slow = reader.tail_batches(slow_job)
    await anext(slow)  # then it takes nothing more
    slow_stream, stream = writing.own(slow_job), writing.own(job)
    reading = asyncio.create_task(collect(reader, job))
    for _ in range(1500):
        writing.push(slow_stream, "x" * 8)
        await asyncio.sleep(0.0005)
    writing.push(stream, "quick", DONE)
    assert text_of(await reading) == "quick"
    (multiplexer,) = reader._multiplexers.values()
    (tail,) = multiplexer.tails
    assert tail.inbox.qsize() <= 8
    writing.push(slow_stream, "", DONE)
    text = ""
    async with asyncio.timeout(10):
        async for batch in slow:
            text += text_of(batch)
    assert text == "x" * 8 * 1500


async def test_an_erased_stream_is_told_as_gone(store: Store, reader: ChunkReader, settings: Settings) -> None:
    job = await queued(store, settings)
    reading = asyncio.create_task(collect(reader, job))
    await asyncio.sleep(0.1)
    await store.erase(job)
    with pytest.raises(StreamGone):
        async with asyncio.timeout(3):
            await reading


async def test_missing_text_is_told_as_a_gap(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    stream = writing.own(job)
    for part in ("aaaaaaaa", "bbbbbbbb", "cccccccc"):
        writing.push(stream, part)
        await asyncio.sleep(0.1)
    send(writing, "XDEL", store.stream_key(job), "16-0")
    with pytest.raises(StreamGap):
        await collect(reader, job)


async def test_a_cancel_reaches_the_owner_within_a_second(store: Store, writing: Writing, settings: Settings) -> None:
    job = await queued(store, settings)
    writing.own(job)
    await store.cancel(job)
    await asyncio.sleep(settings.renew_ms / 1000 + 0.2)
    assert writing.cancelled == [job.id]


async def test_a_replaced_owner_learns_that_it_is_fenced(store: Store, writing: Writing, settings: Settings) -> None:
    job = await queued(store, settings)
    stream = writing.own(job)
    send(writing, "HSET", stream.keys.record, "owner", "somebody")
    writing.push(stream, "zombie")
    assert stream.settled.wait(5)
    assert stream.lost == calls.Fenced()


async def test_a_killed_store_loses_no_chunk_that_was_not_refused(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings, valkey: Valkey
) -> None:
    job = await queued(store, settings)
    stream = writing.own(job)
    await asyncio.sleep(1.5)  # the append-only file is synced each second
    reading = asyncio.create_task(collect(reader, job))
    text = "".join(f"{n} " for n in range(600))
    pushing = threading.Thread(target=_push_slowly, args=(writing, stream, text))
    pushing.start()
    await asyncio.sleep(0.3)
    valkey.kill()
    await asyncio.sleep(0.5)
    valkey.start()
    pushing.join()
    assert text_of(await reading) == text


def _push_slowly(writing: Writing, stream: OwnedStream, text: str) -> None:
    for char in text:
        writing.push(stream, char)
        time.sleep(0.001)
    writing.push(stream, "", DONE)
