"""The store behind Redis Sentinel: the primary is whoever the Sentinels say, also when that changes in mid-stream."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from brokers import connect
from brokers.errors import ConfigurationError, StoreUnavailable
from brokers.settings import Settings
from brokers.store import Store
from compose.servers import ValkeySentinel
from tests.integration import lives
from tests.integration.test_store import make_job
from tests.integration.test_streams import Writing, queued


@pytest.fixture(scope="module")
def group(state: Path) -> Iterator[ValkeySentinel]:
    with ValkeySentinel(state / "sentinel") as group:
        yield group


@pytest.fixture(scope="module")
def guarded(settings: Settings, group: ValkeySentinel) -> Settings:
    return lives.at(settings, group.url)


@pytest.fixture
async def store(guarded: Settings) -> AsyncIterator[Store]:
    store = Store(guarded)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def writing(guarded: Settings) -> Iterator[Writing]:
    writing = Writing(guarded)
    yield writing
    writing.writer.close()


async def test_jobs_live_their_whole_life(guarded: Settings) -> None:
    await lives.a_whole_life(guarded)


async def test_a_job_is_listed_cancelled_and_erased(guarded: Settings) -> None:
    await lives.a_job_is_listed_cancelled_and_erased(guarded)


async def test_a_lost_job_is_found(guarded: Settings) -> None:
    await lives.a_lost_job_is_found(guarded)


async def test_a_cancel_is_heard(store: Store, guarded: Settings, writing: Writing) -> None:
    jobs = [await queued(store, guarded) for _ in range(3)]
    for job in jobs:
        writing.own(job)
    heard = await asyncio.to_thread(lives.cancels_are_heard, guarded, jobs)
    assert heard == {job.id for job in jobs}


async def test_a_replica_that_evicts_is_refused(store: Store, group: ValkeySentinel, guarded: Settings) -> None:
    replica = next(server for server in group.servers if server is not group.primary)._probe
    replica.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with (
            connect.blocking(guarded, guarded.region, timeout_s=5) as client,
            pytest.raises(ConfigurationError, match="evicts"),
        ):
            connect.prepare(client, guarded)
    finally:
        replica.config_set("maxmemory-policy", "noeviction")


async def test_one_sentinel_that_hangs_holds_up_nobody(group: ValkeySentinel, guarded: Settings) -> None:
    hung = group.sentinels[0].process.pid
    os.kill(hung, signal.SIGSTOP)
    try:
        store = Store(guarded)
        began = time.monotonic()
        assert await store.get(make_job(guarded).id) is None
        assert time.monotonic() - began < 1.2
        await store.close()
    finally:
        os.kill(hung, signal.SIGCONT)


async def fails_over(
    group: ValkeySentinel, store: Store, guarded: Settings, writing: Writing, how: signal.Signals
) -> None:
    """The primary is lost while a job runs; its writer and its reader go on with the next one."""
    job = await queued(store, guarded)
    lost = group.primary
    async with lives.opened(guarded) as (_, reader):
        listener = lives.Listener(reader, job)
        dictation = lives.Dictation(writing, [job], tokens=800, pause_s=0.01)
        dictation.start()
        await asyncio.sleep(1.0)
        os.killpg(lost.process.pid, how)
        await asyncio.sleep(0.5)
        with pytest.raises(StoreUnavailable):
            await store.get(job.id)
        await dictation.written()
        assert await listener.text(timeout_s=30) == dictation.text
        assert group.primary is not lost
    found = await store.get(job.id)
    assert found
    assert found.pos == len(dictation.text)


async def test_a_primary_that_is_killed_in_mid_stream_is_replaced(
    group: ValkeySentinel, store: Store, guarded: Settings, writing: Writing
) -> None:
    lost = group.primary
    await fails_over(group, store, guarded, writing, signal.SIGKILL)
    lost.process.kill()
    lost.start()
    group.form()


async def test_a_primary_that_hangs_is_replaced_and_fenced_when_it_wakes(
    group: ValkeySentinel, store: Store, guarded: Settings, writing: Writing
) -> None:
    lost = group.primary
    await fails_over(group, store, guarded, writing, signal.SIGSTOP)
    os.killpg(lost.process.pid, signal.SIGCONT)
    group.form()
    job = await queued(store, guarded)
    assert await store.get(job.id)
    assert group.primary is not lost


async def test_sentinels_that_are_away_are_an_outage(settings: Settings) -> None:
    store = Store(lives.at(settings, "redis+sentinel://127.0.0.1:1,127.0.0.1:2/lingbot/0"))
    with pytest.raises(StoreUnavailable):
        await store.get(make_job(settings).id)
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()
