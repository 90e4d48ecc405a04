"""The store's functions against a real server: who may write, and what a job's record says afterwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from brokers import calls, connect, entries, names
from brokers.errors import StoreUnavailable
from brokers.job import FinishReason, Job, Kind, Lane, Sampling, State, TextSpec, new_job_id
from brokers.seal import Sealer
from brokers.settings import Settings
from brokers.store import Store
from compose.servers import Valkey

LEASE_MS = 3000


def make_job(settings: Settings, *, tenant: str = "acme", lives_s: float = 60.0) -> Job:
    now_ms = int(time.time() * 1000)
    return Job(
        id=new_job_id(settings.region),
        tenant=tenant,
        kind=Kind.TEXT,
        model="scripted",
        lane=Lane.STANDARD,
        home=settings.region,
        place=settings.region,
        state=State.ACCEPTED,
        created_ms=now_ms,
        deadline_ms=now_ms + int(lives_s * 1000),
        prompt_tokens=3,
        metadata={"note": "1"},
    )


class Writer:
    """A worker's side of one job, one blocking call at a time."""

    def __init__(self, client: connect.Blocking, settings: Settings, job: Job) -> None:
        self._client = client
        self._settings = settings
        self.job = job
        self.keys = calls.keys(job, settings.partitions)

    def claim(self, token: str = "one", worker: str = "w1", lease_ms: int = LEASE_MS, gen: int = 1) -> Any:
        job = msgspec.structs.replace(self.job, gen=gen)
        return self._call(calls.claim(job, self.keys, worker=worker, token=token, lease_ms=lease_ms))

    def append(self, start: int, text: str, token: str = "one") -> Any:
        pieces = list(text)
        ids = [ord(char) for char in pieces]
        fields = entries.fields(ids, pieces, "d" * 16)
        return self._call(calls.append(self.keys, token, LEASE_MS, start, start + len(pieces), fields))

    def finish(self, pos: int, token: str = "one") -> Any:
        return self._call(calls.finish(self.keys, token, pos, State.SUCCEEDED, FinishReason.STOP, 3, None))

    def renew(self, token: str = "one") -> Any:
        return self._call(calls.renew(self.keys, token, LEASE_MS))

    def release(self, token: str = "one") -> Any:
        return self._call(calls.release(self.job, self.keys, token, self._settings))

    def reconcile(self, *, assume_lost: bool = False) -> Any:
        return self._call(calls.reconcile(self.job.id, self.keys, self._settings, assume_lost=assume_lost))

    def stream(self) -> list[Any]:
        return [entries.parse(entry_id, raw) for entry_id, raw in self._call(calls.entries_of(self.keys))]

    def _call(self, call: calls.Call) -> Any:
        return connect.send(self._client, call)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    store = Store(settings)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def writer(store: Store, settings: Settings) -> AsyncIterator[Writer]:
    """A job that is queued, and a worker that may claim it."""
    job = make_job(settings)
    await store.create(job, b"sealed")
    await store.queued(job)
    with connect.blocking(settings, settings.region, timeout_s=5) as client:
        yield Writer(client, settings, job)


async def test_a_created_job_reads_back_whole(store: Store, settings: Settings) -> None:
    job = make_job(settings)
    await store.create(job, b"sealed")
    assert await store.get(job.id) == job


async def test_a_job_of_another_region_or_no_job_at_all_is_none(store: Store, settings: Settings) -> None:
    assert await store.get(new_job_id("elsewhere")) is None
    assert await store.get("nonsense") is None
    assert await store.get(new_job_id(settings.region)) is None


async def test_queued_follows_accepted_only(store: Store, settings: Settings) -> None:
    job = make_job(settings)
    await store.create(job, b"")
    assert await store.withdraw(job) is True
    assert await store.queued(job) is State.WITHDRAWN


async def test_a_running_job_cannot_be_withdrawn(store: Store, writer: Writer) -> None:
    assert isinstance(writer.claim(), calls.Claimed)
    assert await store.withdraw(writer.job) is False


async def test_a_whole_life_leaves_a_whole_stream(store: Store, writer: Writer) -> None:
    assert writer.claim() == calls.Claimed(0, 1, b"sealed")
    assert writer.append(0, "he") == calls.Accepted()
    assert writer.append(2, "llo") == calls.Accepted()
    assert writer.finish(5) == calls.Accepted()

    first, started, he, llo, end = writer.stream()
    assert [first.kind, started.kind, end.kind] == ["accepted", "started", "end"]
    assert (he.start, he.pos, he.text, he.token_ids) == (0, 2, "he", (104, 101))
    assert (llo.start, llo.pos, llo.text, llo.offsets) == (2, 5, "llo", (1, 2, 3))
    assert end.data["usage"] == {"prompt_tokens": 3, "completion_tokens": 5}
    job = await store.get(writer.job.id)
    assert job
    assert (job.state, job.pos, job.finish_reason) == (State.SUCCEEDED, 5, FinishReason.STOP)


def test_a_chunk_at_the_wrong_position_is_refused_and_told_where_the_stream_stands(writer: Writer) -> None:
    writer.claim()
    writer.append(0, "abc")
    assert writer.append(2, "x") == calls.Rewind(3)
    assert writer.finish(7) == calls.Rewind(3)


def test_a_live_owner_is_not_replaced(writer: Writer) -> None:
    writer.claim()
    second = writer.claim(token="two", worker="w2")
    assert isinstance(second, calls.Busy)
    assert second.worker == "w1"
    assert 0 < second.left_ms <= LEASE_MS


def test_a_silent_owner_is_replaced_and_fenced(writer: Writer) -> None:
    writer.claim(lease_ms=1)
    writer.append(0, "ab")  # renews the lease
    time.sleep(LEASE_MS / 1000 + 0.05)
    assert writer.claim(token="two", worker="w2") == calls.Claimed(2, 2, b"sealed")
    assert writer.append(2, "zombie") == calls.Fenced()
    assert writer.finish(2) == calls.Fenced()
    assert writer.renew() == calls.Fenced()
    assert writer.append(2, "c", token="two") == calls.Accepted()
    assert [entry.kind for entry in writer.stream() if hasattr(entry, "kind")][-1] == "taken_over"


def test_nothing_is_written_after_the_end(writer: Writer) -> None:
    writer.claim()
    writer.finish(0)
    assert writer.append(0, "late") == calls.Fenced()
    assert writer.claim(token="two") == calls.Ended(State.SUCCEEDED)


def test_an_older_publish_generation_is_stale(writer: Writer) -> None:
    assert isinstance(writer.reconcile(assume_lost=True), calls.Publish)
    assert writer.claim() == calls.Stale()
    assert isinstance(writer.claim(gen=2), calls.Claimed)


async def test_cancelling_a_queued_job_ends_it_at_once(store: Store, writer: Writer) -> None:
    assert await store.cancel(writer.job) is State.CANCELLED
    assert await store.cancel(writer.job) is State.CANCELLED
    assert writer.claim() == calls.Ended(State.CANCELLED)
    end = writer.stream()[-1]
    assert end.data["usage"] == {"prompt_tokens": 0, "completion_tokens": 0}


async def test_cancelling_a_running_job_raises_a_flag_its_owner_sees(store: Store, writer: Writer) -> None:
    writer.claim()
    assert await store.cancel(writer.job) is State.RUNNING
    assert writer.append(0, "a") == calls.Accepted(cancel=True)
    assert writer.renew() == calls.Accepted(cancel=True)


def test_a_released_job_is_claimed_at_once_and_goes_on(writer: Writer) -> None:
    writer.claim()
    writer.append(0, "ab")
    assert writer.release() == calls.Accepted()
    assert isinstance(writer.append(2, "c"), calls.Unowned)
    assert writer.claim(token="two") == calls.Claimed(2, 2, b"sealed")


async def test_a_job_past_its_deadline_expires_at_the_claim(store: Store, settings: Settings) -> None:
    job = make_job(settings, lives_s=0.01)
    await store.create(job, b"")
    time.sleep(0.02)
    with connect.blocking(settings, settings.region, timeout_s=5) as client:
        writer = Writer(client, settings, job)
        assert writer.claim() == calls.Ended(State.EXPIRED)
        assert writer.stream()[-1].data["status"] == "expired"


def test_a_job_whose_owner_fell_silent_is_published_again(writer: Writer) -> None:
    writer.claim(lease_ms=1)
    time.sleep(0.01)
    assert writer.reconcile() == calls.Publish(2, b"sealed")


def test_a_job_with_a_live_owner_is_left_alone(writer: Writer) -> None:
    writer.claim()
    assert writer.reconcile(assume_lost=True) is None


def test_record_and_stream_expire_after_the_end(writer: Writer, settings: Settings) -> None:
    writer.claim()
    writer.finish(0)
    left_ms = [writer._call(calls.Call(("PTTL", key), int)) for key in (writer.keys.record, writer.keys.stream)]
    assert all(0 < left <= settings.retention_s * 1000 for left in left_ms)


async def test_what_is_due_is_due_by_the_stores_clock(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reconciler whose own clock is an hour behind finds it all the same."""
    writer.claim(lease_ms=1)
    time.sleep(0.01)
    behind = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: behind)
    assert writer.job.id in await store.call(calls.due(writer.keys.live, 1000))


async def test_jobs_are_listed_newest_first_and_by_tenant(store: Store, settings: Settings) -> None:
    tenant = new_job_id("t")[-20:]
    jobs = []
    for _ in range(5):
        jobs.append(make_job(settings, tenant=tenant))
        await store.create(jobs[-1], b"")
        time.sleep(0.003)
    newest_first = [job.id for job in reversed(jobs)]
    assert [job.id for job in await store.list_jobs(tenant, 10)] == newest_first
    assert [job.id for job in await store.list_jobs(tenant, 2)] == newest_first[:2]
    assert [job.id for job in await store.list_jobs(tenant, 10, before=newest_first[1])] == newest_first[2:]
    await store.erase(next(job for job in jobs if job.id == newest_first[1]))
    assert [job.id for job in await store.list_jobs(tenant, 10, before=newest_first[1])] == newest_first[2:]


async def test_a_listing_goes_on_past_jobs_whose_records_are_gone(store: Store, settings: Settings) -> None:
    """Also when they fill a page of their partition, each of which is asked for a page at a time."""
    tenant = new_job_id("t")[-20:]
    drawn = (make_job(settings, tenant=tenant) for _ in itertools.count())
    here = (job for job in drawn if names.partition(job.id, settings.partitions) == names.partition_at(0))
    old, *newer = itertools.islice(here, 9)
    for job in (old, *newer):
        await store.create(job, b"")
        await asyncio.sleep(0.002)
    for job in newer:
        await store.call(calls.Call(("DEL", calls.keys(job, settings.partitions).record), bool))
    assert [job.id for job in await store.list_jobs(tenant, 3)] == [old.id]


async def test_what_is_durable_survives_a_killed_store(store: Store, settings: Settings, valkey: Valkey) -> None:
    job = make_job(settings)
    await store.create(job, b"")
    await store.cancel(job)
    assert await store.durable(job) is True
    valkey.kill()
    valkey.start()
    async with asyncio.timeout(10):
        while (found := await get_when_back(store, job)) is None:
            await asyncio.sleep(0.1)
    assert found.state is State.CANCELLED


async def get_when_back(store: Store, job: Job) -> Job | None:
    try:
        return await store.get(job.id)
    except StoreUnavailable:
        return None


async def test_a_store_that_evicts_is_refused(store: Store, settings: Settings) -> None:
    from brokers.errors import ConfigurationError

    with connect.blocking(settings, settings.region, timeout_s=5) as client:
        server = connect.one_server(client)
        server.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(ConfigurationError, match="evicts"):
                connect.prepare(client, settings)
        finally:
            server.config_set("maxmemory-policy", "noeviction")


def test_a_sealed_spec_opens_only_for_its_own_job(settings: Settings) -> None:
    from brokers.errors import SealBroken

    sealer, job, other = Sealer(settings), make_job(settings), make_job(settings)
    spec = TextSpec(prompt_ids=(1, 2, 3), sampling=Sampling(seed=2**63, stop=("é",)))
    sealed = sealer.seal(job, spec)
    assert sealer.open(job, sealed) == spec
    with pytest.raises(SealBroken):
        sealer.open(other, sealed)
    with pytest.raises(SealBroken):
        sealer.open(job, sealed[:-1] + bytes([sealed[-1] ^ 1]))
