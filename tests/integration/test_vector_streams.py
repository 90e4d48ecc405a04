"""Streams of vectors over a real store: entries stay small, and a reader goes on where a store forgot."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from brokers import calls, connect, entries
from brokers.chunk_reader import ChunkReader
from brokers.chunk_writer import OwnedStream, Pushed, VectorStream
from brokers.job import Content, Control, Entry, Job, Kind
from brokers.settings import Settings
from brokers.store import Store
from tests.integration.test_lost_text import Reading, lose, restarts
from tests.integration.test_store import make_job
from tests.integration.test_streams import DONE, Writing, collect, reader, store, writing

__all__ = ["reader", "store", "writing"]

_WIDTH = 384


def vector(number: int, rounding: float = 0.0) -> bytes:
    return struct.pack(f"<{_WIDTH}f", *[number + rounding] * _WIDTH)


async def queued(store: Store, settings: Settings) -> Job:
    job = msgspec.structs.replace(make_job(settings), kind=Kind.EMBEDDING)
    await store.create(job, b"")
    await store.queued(job)
    return job


def own(writing: Writing, job: Job, token: str = "one") -> OwnedStream:
    keys = calls.keys(job, writing.settings.partitions)
    call = calls.claim(job, keys, worker="w", token=token, lease_ms=writing.settings.lease_ms)
    assert isinstance(connect.send(writing.writer.client, call), calls.Claimed)
    stream = VectorStream(job, keys, token)
    writing.writer.add(stream)
    return stream


def vectors_of(found: list[Entry]) -> list[bytes]:
    return [each for entry in found if isinstance(entry, Content) for each in entries.split(entry)]


async def test_many_vectors_at_once_are_many_small_entries_and_then_the_end(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    reading = asyncio.create_task(collect(reader, job))
    written = [vector(n) for n in range(2000)]
    writing.writer.push([Pushed(own(writing, job), (), written, DONE)])
    found = await reading
    assert vectors_of(found) == written
    contents = [entry for entry in found if isinstance(entry, Content)]
    assert [entry.start for entry in contents] == [0, *(entry.pos for entry in contents[:-1])]
    assert max(len(entry.vectors) for entry in contents) <= 1 << 15
    end = found[-1]
    assert isinstance(end, Control)
    assert (end.pos, end.data["usage"]["completion_tokens"], end.data["digest"]) == (2000, 0, "")


async def test_what_the_store_forgot_is_written_again_from_there(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    stream = own(writing, job)
    writing.writer.push([Pushed(stream, (), [vector(n) for n in range(50)], None)])
    while stream.waiting:
        await asyncio.sleep(0.01)
    for command in (
        ("DEL", stream.keys.stream),
        ("XADD", stream.keys.stream, "0-1", "k", "accepted", "d", "{}", "ts", 1),
    ):
        connect.send(writing.writer.client, calls.Call(command, bool))
    connect.send(writing.writer.client, calls.Call(("HSET", stream.keys.record, "pos", 0, "ctl", 1), bool))
    writing.writer.push([Pushed(stream, (), [vector(50)], DONE)])
    assert vectors_of(await collect(reader, job)) == [vector(n) for n in range(51)]


async def test_a_reader_goes_on_although_what_it_read_is_made_again_and_rounded_otherwise(
    store: Store, reader: ChunkReader, writing: Writing, settings: Settings
) -> None:
    job = await queued(store, settings)
    first = own(writing, job)
    reading = Reading(reader, job)
    writing.writer.push([Pushed(first, (), [vector(n) for n in range(30)], None)])
    await reading.until(30)
    await lose(store, writing, settings, job)
    again = [vector(n, rounding=1e-3) for n in range(45)]
    writing.writer.push([Pushed(own(writing, job, "two"), (), again, DONE)])
    found = await reading.end()
    assert restarts(found) == []
    assert vectors_of(found) == [*(vector(n) for n in range(30)), *again[30:]]


def test_vectors_weigh_in_the_window_by_their_size(settings: Settings) -> None:
    job = make_job(settings)
    stream = VectorStream(job, calls.keys(job, settings.partitions), "one")
    stream.push((), [vector(n) for n in range(10)])
    assert stream.weight == 10 * _WIDTH * 4 // 64
