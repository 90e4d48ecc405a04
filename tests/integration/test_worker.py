"""A real Celery worker on the scripted model: a message in, a stream out, whatever happens to it meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from brokers import entries, names, topology
from brokers.chunk_reader import ChunkReader
from brokers.job import Content, Control, Entry, Job, Lane, Sampling, State, TextSpec
from brokers.models import Registry
from brokers.publisher import Publisher
from brokers.seal import Sealer
from brokers.settings import Settings
from brokers.store import Store
from compose import commands, probes
from compose.servers import Process
from tests.integration.test_store import make_job
from tests.platform import APART_MODEL


def worker_process(state: Path, settings: Settings, name: str) -> Process:
    return Process(
        name,
        commands.worker(settings, [APART_MODEL], name=name),
        env=commands.environment(state / "lingbot.toml"),
        log=state / "logs" / f"{name}.log",
        pid_file=state / "run" / f"{name}.pid",
    )


def wait_until_it_consumes(process: Process, settings: Settings) -> None:
    deadline = time.monotonic() + 30
    while not probes.consumed(settings, names.queue(settings.region, APART_MODEL, Lane.STANDARD)):
        assert process.alive, process.tail(40)
        assert time.monotonic() < deadline, process.tail(40)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def worker(state: Path, settings: Settings) -> Iterator[Process]:
    topology.declare(settings, [APART_MODEL])
    process = worker_process(state, settings, "w1")
    process.spawn()
    try:
        wait_until_it_consumes(process, settings)
        yield process
    finally:
        process.stop(grace_s=10)


class Client:
    """Submits and reads as the API does, without HTTP."""

    def __init__(self, settings: Settings, model: str = APART_MODEL) -> None:
        self.settings = settings
        self.store = Store(settings)
        self.publisher = Publisher(settings)
        self.reader = ChunkReader(settings)
        self.sealer = Sealer(settings)
        self.model = Registry(settings.models_dir).get(model)

    async def submit(
        self, prompt: str, sampling: Sampling, *, lives_s: float = 60.0, lane: Lane = Lane.STANDARD
    ) -> Job:
        ids = self.model.encode(prompt)
        job = msgspec.structs.replace(
            make_job(self.settings, lives_s=lives_s), model=self.model.card.name, prompt_tokens=len(ids), lane=lane
        )
        sealed = self.sealer.seal(job, TextSpec(prompt_ids=ids, sampling=sampling))
        await self.store.create(job, sealed)
        await self.publisher.publish(job, sealed)
        await self.store.queued(job)
        return job

    async def read(self, job: Job, after: int = 0) -> list[Entry]:
        async with asyncio.timeout(30):
            return [entry async for entry in self.reader.tail(job, after)]


@pytest.fixture
async def client(settings: Settings, worker: Process) -> AsyncIterator[Client]:
    client = Client(settings)
    await client.store.open()
    await client.publisher.open()
    await client.reader.open()
    yield client
    await client.reader.close()
    await client.publisher.close()
    await client.store.close()


def text_of(found: list[Entry]) -> str:
    return "".join(entry.text for entry in found if isinstance(entry, Content))


def end_of(found: list[Entry]) -> dict[str, object]:
    assert isinstance(found[-1], Control)
    return found[-1].data


async def test_a_prompt_becomes_a_whole_stream(client: Client) -> None:
    job = await client.submit("hello", Sampling(max_tokens=50, seed=1, ignore_eos=True))
    found = await client.read(job)
    end = end_of(found)
    assert end["status"] == "succeeded"
    assert end["finish_reason"] == "length"
    assert end["usage"] == {"prompt_tokens": job.prompt_tokens, "completion_tokens": 50}
    digest = entries.Digest()
    digest.update(text_of(found))
    assert end["digest"] == digest.hex()


async def test_the_same_request_gives_the_same_text(client: Client) -> None:
    sampling = Sampling(max_tokens=40, seed=7, ignore_eos=True)
    jobs = [await client.submit("again", sampling) for _ in range(20)]
    texts = {text_of(found) for found in await asyncio.gather(*map(client.read, jobs))}
    assert len(texts) == 1


async def test_a_cancel_frees_the_engine_within_a_second(client: Client) -> None:
    job = await client.submit("long !slow@5", Sampling(max_tokens=8000, ignore_eos=True))
    tail = client.reader.tail(job)
    async for entry in tail:
        if isinstance(entry, Content):
            break
    began = time.monotonic()
    await client.store.cancel(job)
    async for entry in tail:
        last = entry
    assert time.monotonic() - began < 1.0
    assert isinstance(last, Control)
    assert last.data["status"] == "cancelled"


async def test_a_deadline_holds_in_the_engine(client: Client) -> None:
    job = await client.submit("long !slow@5", Sampling(max_tokens=8000, ignore_eos=True), lives_s=1.0)
    end = end_of(await client.read(job))
    assert end["status"] == "expired"


class _Tomorrow(Sampling, frozen=True, omit_defaults=True):
    """A later version's: it has learned to rhyme."""

    rhyme: bool = False


async def test_a_job_that_only_a_newer_worker_knows_is_left_to_one(client: Client, worker: Process) -> None:
    job = await client.submit("roses are red", _Tomorrow(max_tokens=30, rhyme=True), lives_s=8)
    refusal = f"job {job.id}: The job asks for what this version does not know"
    while refusal not in worker.log.read_text():
        await asyncio.sleep(0.05)
    record = await client.store.get(job.id)
    assert record is not None
    assert (record.state, record.attempt) == (State.QUEUED, 0)
    plain = await client.submit("roses are red", _Tomorrow(max_tokens=30, ignore_eos=True))
    assert end_of(await client.read(plain))["status"] == "succeeded"
    assert end_of(await client.read(job))["status"] == "expired"  # nobody came, and its message goes round no more


async def test_a_message_delivered_twice_runs_once(client: Client) -> None:
    ids = client.model.encode("twice")
    job = msgspec.structs.replace(make_job(client.settings), model=APART_MODEL, prompt_tokens=len(ids))
    sealed = client.sealer.seal(job, TextSpec(prompt_ids=ids, sampling=Sampling(max_tokens=30, ignore_eos=True)))
    await client.store.create(job, sealed)
    await asyncio.gather(*(client.publisher.publish(job, sealed) for _ in range(5)))
    found = await client.read(job)
    assert end_of(found)["usage"] == {"prompt_tokens": job.prompt_tokens, "completion_tokens": 30}
    record = await client.store.get(job.id)
    assert record
    assert record.attempt == 1


async def test_bulk_work_in_hand_does_not_hold_up_an_interactive_job(client: Client) -> None:
    slow = Sampling(max_tokens=400, ignore_eos=True)
    bulk = [await client.submit(f"bulk {n} !slow@2", slow, lane=Lane.BATCH) for n in range(40)]
    await asyncio.sleep(0.5)
    job = await client.submit("quick", Sampling(max_tokens=5, ignore_eos=True), lane=Lane.INTERACTIVE)
    assert end_of(await client.read(job))["status"] == "succeeded"
    states = [record.state for record in [await client.store.get(one.id) for one in bulk] if record]
    assert State.QUEUED in states  # they are far from done
    for one in bulk:
        await client.store.cancel(one)


async def test_a_revoke_that_comes_before_the_message_ends_the_job(client: Client) -> None:
    from workers.app import create_app

    ids = client.model.encode("revoked early")
    job = msgspec.structs.replace(make_job(client.settings), model=APART_MODEL, prompt_tokens=len(ids))
    sealed = client.sealer.seal(job, TextSpec(prompt_ids=ids, sampling=Sampling(max_tokens=3)))
    await client.store.create(job, sealed)
    app = create_app(client.settings)
    with app.connection_for_write() as own:  # kombu's pool may hold one that a killed broker has left
        replies = await asyncio.to_thread(app.control.revoke, job.id, reply=True, timeout=5, limit=1, connection=own)
    assert replies  # of this worker, and of those that other tests left running
    await client.publisher.publish(job, sealed)
    end = end_of(await client.read(job))
    assert (end["status"], end["usage"]) == ("cancelled", {"prompt_tokens": 0, "completion_tokens": 0})


async def test_a_job_that_no_message_tells_of_is_published_by_the_reconciler(client: Client) -> None:
    from brokers.reconciler import Reconciler

    fast = client.settings.model_copy(update={"accepted_grace_s": 0.05})
    store = Store(fast)
    ids = client.model.encode("forgotten")
    job = msgspec.structs.replace(make_job(fast), model=APART_MODEL, prompt_tokens=len(ids))
    await store.create(job, client.sealer.seal(job, TextSpec(prompt_ids=ids, sampling=Sampling(max_tokens=3))))
    await asyncio.sleep(0.1)
    reconciler = Reconciler(fast)
    await reconciler.open()
    await reconciler.sweep()
    assert end_of(await client.read(job))["status"] == "succeeded"
    record = await store.get(job.id)
    assert record
    assert record.gen > 1  # 3 when the platform's own reconciler was there at the same moment
    assert record.state is State.SUCCEEDED


_WORDS = {"type": "array", "items": {"enum": ["sea", "lamp", "river"]}, "minItems": 150, "maxItems": 150}
_TAKEN_OVER = {
    "plain": Sampling(max_tokens=1200, seed=3, ignore_eos=True),
    "in mid-JSON": Sampling(max_tokens=2000, seed=3, json_schema=json.dumps(_WORDS), logprobs=2),
}


@pytest.mark.parametrize("which", _TAKEN_OVER)
async def test_a_killed_worker_is_continued_by_another_without_a_seam(
    client: Client, worker: Process, state: Path, which: str
) -> None:
    sampling = _TAKEN_OVER[which]
    jobs = [await client.submit(f"prompt {n} !slow@1", sampling) for n in range(6)]
    reference = [text_of(await client.read(job)) for job in jobs]
    second = worker_process(state, client.settings, "w2")
    second.spawn()
    await asyncio.sleep(4)
    again = [await client.submit(f"prompt {n} !slow@1", sampling) for n in range(6)]
    readings = [asyncio.create_task(client.read(job)) for job in again]
    await asyncio.sleep(0.15)
    worker.kill()
    try:
        streams = await asyncio.gather(*readings)
    finally:
        worker.spawn()
        wait_until_it_consumes(worker, client.settings)
        second.stop(grace_s=10)
    assert [text_of(found) for found in streams] == reference
    if sampling.json_schema:
        assert {len(json.loads(text)) for text in reference} == {150}
        contents = [entry for found in streams for entry in found if isinstance(entry, Content)]
        assert all(len(entries.split_logprobs(entry)) == entry.pos - entry.start for entry in contents)


async def test_a_worker_that_was_frozen_goes_on_with_its_job_soon_after(client: Client, worker: Process) -> None:
    """Its run is fenced by then, and the next message of the job, which nobody else takes, comes to it at once."""
    from brokers.reconciler import Reconciler

    assert worker.pid
    reconciler = Reconciler(client.settings)
    stop = asyncio.Event()
    sweeping = asyncio.create_task(reconciler.run(stop))
    job = await client.submit("hello !slow@20", Sampling(max_tokens=100, ignore_eos=True))
    reading = asyncio.create_task(client.read(job))
    while not ((running := await client.store.get(job.id)) and running.pos):
        await asyncio.sleep(0.02)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(client.settings.lease_ms / 1000 + 3)
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    try:
        found = await asyncio.wait_for(reading, timeout=15)
    finally:
        stop.set()
        await sweeping
    record = await client.store.get(job.id)
    assert record is not None
    assert (record.state, record.attempt, len(text_of(found)) > 0) == (State.SUCCEEDED, 2, True)


def test_a_worker_that_grew_too_large_drains_and_ends(state: Path, settings: Settings, worker: Process) -> None:
    large = Process(
        "large",
        commands.worker(settings, [APART_MODEL], name="large"),
        env=commands.environment(state / "lingbot.toml", max_rss_mb=20),
        log=state / "logs" / "large.log",
        pid_file=state / "run" / "large.pid",
    )
    large.spawn()
    deadline = time.monotonic() + 30
    while large.alive:
        assert time.monotonic() < deadline, large.tail(30)
        time.sleep(0.1)
    assert large.exit_code == 0, large.tail(30)
    log = large.log.read_text()
    assert "more than max_rss_mb = 20" in log
    assert "draining: no new jobs" in log  # as at SIGTERM, so its jobs end or are handed over
