"""RabbitMQ dies, raises alarms, and delivers again, under load."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from pika import BasicProperties

from brokers import names, topology
from brokers.job import Job, Kind, Lane, Sampling, State, TextSpec, new_job_id
from brokers.models import Model, Registry
from brokers.publisher import Publisher
from brokers.seal import Sealer
from brokers.settings import Settings
from brokers.store import Store
from compose.servers import RabbitMQ
from tests.faults.conftest import Tell
from tests.faults.load import Journal, Work
from tests.faults.report import percentile
from tests.faults.rig import REGION, Rig, Servers, until
from tests.faults.sizes import sizes

_SLOTS = 8
_CLIENTS = 2 * _SLOTS  # all that two workers take: a worker that came back with less would show
_LONG = (1000, 2000)  # tokens, 5 ms each: jobs that outlive an outage
_NORMAL_WATERMARK = "0.4"


@pytest.fixture(scope="module")
def rig(shared: Servers) -> Iterator[Rig]:
    with Rig(shared, "brokers", slots=_SLOTS, drain_s=60.0) as rig:
        yield rig


@sizes(short=1, long=20)
def test_rabbitmq_killed_under_load(rig: Rig, tell: Tell, times: int) -> None:
    chance = random.Random(times)
    recovered = []
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for _ in range(times):
            load.wait_flowing(_CLIENTS, timeout_s=30)
            opened = _bounce(rig.servers.rabbitmq, chance.uniform(0.2, 1.0))
            load.wait_flowing(_CLIENTS, timeout_s=30)
            recovered.append(time.monotonic() - opened)
        journal = load.stop()
        verdict = checker.check(journal.readings)
    tell(
        f"RabbitMQ killed with -9 and restarted, {times} times, under load",
        f"{verdict.jobs} jobs, 0 lost; {_answers(journal)}; all {_CLIENTS} slots at work "
        f"{percentile(recovered, 50):.1f} s (median) and at most {max(recovered):.1f} s after the port opened",
    )
    assert journal.slowest_answer_s() <= 1.5
    assert max(recovered) <= 10.0


@sizes(short=1, long=10)
def test_rabbitmq_and_a_worker_killed_at_once(rig: Rig, tell: Tell, times: int) -> None:
    """The worker's jobs are found while nothing can be published, and their queue is never seen empty."""
    recovered = []
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for n in range(times):
            load.wait_flowing(_CLIENTS, timeout_s=30)
            victim = rig.workers[n % 2]
            rig.kill(victim)
            opened = _bounce(rig.servers.rabbitmq, rig.settings.lease_ms / 1000 + 2.0)
            rig.spawn(victim)
            load.wait_flowing(_CLIENTS, timeout_s=30)
            recovered.append(time.monotonic() - opened)
        verdict = checker.check(load.stop().readings)
    tell(
        f"RabbitMQ and a worker killed at once, RabbitMQ back after the worker's leases ran out, {times} times",
        f"{verdict.jobs} jobs, {verdict.taken_over} takeovers, 0 lost; all {_CLIENTS} streams flowed again at most "
        f"{max(recovered):.1f} s after the port opened",
    )


@sizes(short=1, long=20)
def test_a_message_delivered_again_to_its_worker_is_adopted(rig: Rig, tell: Tell, times: int) -> None:
    chance = random.Random(times)
    with rig.checked() as (api_key, checker), rig.alone("w1"):
        before = _received(rig)
        with rig.load(api_key, _SLOTS, tokens=_LONG) as load:
            for _ in range(times):
                load.wait_flowing(_SLOTS, timeout_s=30)
                received = _received(rig)
                _bounce(rig.servers.rabbitmq, chance.uniform(0.2, 1.0))
                assert until(partial(_has_received_since, rig, received), timeout_s=30)
            verdict = checker.check(load.stop().readings)
        again = _received(rig) - before - verdict.jobs
    tell(
        f"messages delivered again to the worker that runs them ({times} broker bounces)",
        f"{verdict.jobs} jobs, {again} deliveries again, {verdict.taken_over} takeovers, "
        f"{verdict.attempts} attempt each",
    )
    assert again > 0
    assert (verdict.taken_over, verdict.attempts) == (0, 1)


@pytest.mark.faults
def test_a_worker_that_drains_keeps_its_connection(rig: Rig, tell: Tell) -> None:
    """Celery's own warm shutdown sends no heartbeats, so the broker hangs up and delivers the running job again."""
    chance = random.Random("drain")
    works = [rig.work(chance, tokens=(5600, 5601))]  # 28 s: the broker waits for two heartbeats of 10 s
    with rig.checked() as (api_key, checker), rig.alone("w1"):
        with rig.load_of(api_key, works) as load:
            load.wait_flowing(1, timeout_s=30)
            asked = time.monotonic()
            rig.processes["w1"].ask_to_stop()
            journal = load.finish(timeout_s=60)
            drained_s = time.monotonic() - asked
        assert until(lambda: not rig.processes["w1"].alive)
        rig.spawn("w1")
        verdict = checker.check(journal.readings)
    tell(
        f"worker asked to stop, draining for {drained_s:.0f} s",
        f"its job ended there: {verdict.attempts} attempt, {verdict.taken_over} takeovers",
    )
    assert drained_s > 25
    assert (verdict.taken_over, verdict.attempts) == (0, 1)


@pytest.mark.faults
def test_a_worker_that_drains_takes_nothing_when_its_connection_comes_back(rig: Rig, tell: Tell) -> None:
    chance = random.Random("drain")
    running, waiting = ([rig.work(chance, tokens=(1600, 1601))] for _ in range(2))
    with rig.checked() as (api_key, checker), rig.alone("w1"), rig.load_of(api_key, running) as load:
        load.wait_flowing(1, timeout_s=30)
        before = _received(rig)
        rig.processes["w1"].ask_to_stop()
        rig.servers.rabbitmq.ctl("close_all_connections", "a fault")
        with rig.load_of(api_key, waiting) as other:
            journal = load.finish(timeout_s=60)
            assert until(lambda: not rig.processes["w1"].alive)
            taken = rig.log("w1").count(" received") - before
            rig.spawn("w1")
            verdict = checker.check(journal.readings + other.finish(timeout_s=60).readings)
    tell(
        "the connection of a worker that drains is lost, and a job waits meanwhile",
        f"it took {taken} messages; {verdict.jobs} jobs, {verdict.attempts} attempt each",
    )
    assert (taken, verdict.attempts) == (0, 1)


_NO_JOBS: list[tuple[bytes, dict[str, object] | None]] = [
    (b"", None),
    (b"{not json", {"task": "lingbot.text.v1", "id": "x"}),
    (b"[]", {"task": "lingbot.text.v1", "id": "x"}),  # Celery cannot take it apart, and would end
    (b"[[], [], {}]", {"task": "lingbot.text.v1", "id": "x"}),
    (b'[[], {"created_ms": "x"}, {}]', {"task": "lingbot.text.v1", "id": "x"}),
    (b"[[], {}, {}]", {"task": "lingbot.text.v1", "id": "x", "eta": "2026-01-01T00:00:00"}),
    (b"[[], {}, {}]", {"task": "os.system", "id": "x"}),
]


def test_messages_that_are_no_jobs(rig: Rig, tell: Tell) -> None:
    dead = names.dead_queue(REGION)
    with rig.checked() as (api_key, checker), topology.connection(rig.settings, REGION) as connection:
        channel = connection.channel()
        key = names.routing_key(rig.model, Lane.STANDARD)
        for body, headers in _NO_JOBS * 3:
            properties = BasicProperties("application/json", "utf-8", headers, delivery_mode=2)
            channel.basic_publish(names.EXCHANGE, key, body, properties)
        works = [rig.work(random.Random(n), tokens=(40, 80)) for n in range(_CLIENTS)]
        verdict = checker.check(rig.load_of(api_key, works).start().finish().readings)
        found = channel.queue_purge(dead).method.message_count
    tell(
        f"{found} messages that are no job's, by hand, in a lane's queue",
        f"all in the dead-letter queue; the workers live, {verdict.jobs} jobs beside them, {verdict.attempts} attempt",
    )
    assert found == len(_NO_JOBS) * 3
    assert all(rig.processes[worker].alive for worker in rig.workers)


@pytest.mark.parametrize("alarm", ["memory", pytest.param("disk", marks=pytest.mark.faults)])
def test_an_alarm_of_rabbitmq(rig: Rig, tell: Tell, alarm: str) -> None:
    with rig.checked() as (api_key, checker), rig.load(api_key, _SLOTS) as load:
        load.wait_flowing(_SLOTS, timeout_s=30)
        _raise_alarm(rig.servers.rabbitmq, alarm)
        raised = time.monotonic()
        try:
            assert until(lambda: any(a.status == 503 and a.at > raised for a in load.journal.answers))
            time.sleep(1)
        finally:
            _clear_alarm(rig.servers.rabbitmq, alarm)
        cleared = time.monotonic()
        assert until(lambda: any(a.status == 202 and a.at > cleared for a in load.journal.answers))
        normal_s = next(a.at for a in load.journal.answers if a.status == 202 and a.at > cleared) - cleared
        journal = load.stop()
        verdict = checker.check(journal.readings)
    tell(
        f"{alarm} alarm of RabbitMQ raised and cleared",
        f"{verdict.jobs} jobs, 0 lost; {_answers(journal)}; submissions taken again {normal_s:.1f} s after it",
    )
    assert all(answer.retry_after for answer in journal.answers if answer.status == 503)
    assert journal.slowest_answer_s() <= 1.5
    assert normal_s <= 2.0


@sizes(short=60, long=1000)
def test_every_message_published_twice(rig: Rig, tell: Tell, times: int) -> None:
    chance = random.Random(times)
    works = [rig.work(chance, tokens=(32, 64)) for _ in range(times)]
    with rig.checked() as (_, checker):
        jobs, at_work = asyncio.run(_publish_all_twice(rig.settings, checker.tenant, works, chance))
        verdict = checker.check_jobs({job.id: work for job, work in zip(jobs, works, strict=True)})
    tell(
        f"{times} messages published twice, in any order, {at_work} of them while the job ran",
        f"{verdict.jobs} results, each counted once; {verdict.taken_over} owners lost their job",
    )
    assert (verdict.taken_over, verdict.attempts) == (0, 1)


def _bounce(rabbitmq: RabbitMQ, down_s: float) -> float:
    """Kill it with -9 and start it again; when its port opened."""
    rabbitmq.kill()
    time.sleep(down_s)
    rabbitmq.launch()
    assert until(lambda: _listens(rabbitmq.port), timeout_s=60)
    opened = time.monotonic()
    rabbitmq.wait_ready()
    return opened


def _received(rig: Rig) -> int:
    """Messages that came to the first worker."""
    return rig.log("w1").count(" received")


def _has_received_since(rig: Rig, before: int) -> bool:
    return _received(rig) > before


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _raise_alarm(rabbitmq: RabbitMQ, alarm: str) -> None:
    limit = {"memory": ("set_vm_memory_high_watermark", "0.0000001"), "disk": ("set_disk_free_limit", "1000000GB")}
    rabbitmq.ctl(*limit[alarm])


def _clear_alarm(rabbitmq: RabbitMQ, alarm: str) -> None:
    limit = {"memory": ("set_vm_memory_high_watermark", _NORMAL_WATERMARK), "disk": ("set_disk_free_limit", "256MB")}
    rabbitmq.ctl(*limit[alarm])


def _answers(journal: Journal) -> str:
    refused = sum(answer.status == 503 for answer in journal.answers)
    return (
        f"{len(journal.answers)} submissions answered in {journal.slowest_answer_s():.2f} s at most, "
        f"{refused} of them 503"
    )


# --- published twice ------------------------------------------------------------------------------------------


async def _publish_all_twice(
    settings: Settings, tenant: str, works: Sequence[Work], chance: random.Random
) -> tuple[list[Job], int]:
    """The jobs, and how many of them ran when their second message came."""
    model, sealer = Registry(settings.models_dir).get(works[0].model), Sealer(settings)
    made = [_make(tenant, work, model, sealer) for work in works]
    store, publisher = Store(settings), Publisher(settings)
    await store.open()
    await publisher.open()
    try:
        half = len(made) // 2
        for some in _batches(made[:half]):
            await asyncio.gather(*(store.create(job, sealed) for job, sealed in some))
        early = made[:half] * 2
        chance.shuffle(early)
        for some in _batches(early):
            await asyncio.gather(*(_publish(store, publisher, *one) for one in some))
        at_work = 0
        for start in range(half, len(made), _CLIENTS):
            at_work += await _again_while_they_run(store, publisher, made[start : start + _CLIENTS])
        return [job for job, _ in made], at_work
    finally:
        await publisher.close()
        await store.close()


def _batches(made: Sequence[tuple[Job, bytes]], size: int = 100) -> Iterator[Sequence[tuple[Job, bytes]]]:
    """So many at once as are answered well within a call's deadline."""
    return (made[start : start + size] for start in range(0, len(made), size))


async def _again_while_they_run(store: Store, publisher: Publisher, made: Sequence[tuple[Job, bytes]]) -> int:
    states = await asyncio.gather(*(_again_once_it_runs(store, publisher, *one) for one in made))
    return states.count(State.RUNNING)


async def _again_once_it_runs(store: Store, publisher: Publisher, job: Job, sealed: bytes) -> State:
    await store.create(job, sealed)
    await _publish(store, publisher, job, sealed)
    state = await _begun(store, job)
    await _publish(store, publisher, job, sealed)
    return state


async def _publish(store: Store, publisher: Publisher, job: Job, sealed: bytes) -> None:
    await publisher.publish(job, sealed)
    await store.queued(job)


async def _begun(store: Store, job: Job) -> State:
    async with asyncio.timeout(60):
        while True:
            now = await store.get(job.id)
            if now and now.state not in {State.ACCEPTED, State.QUEUED}:
                return now.state
            await asyncio.sleep(0.005)


def _make(tenant: str, work: Work, model: Model, sealer: Sealer) -> tuple[Job, bytes]:
    prompt = model.encode(work.prompt)
    now_ms = int(time.time() * 1000)
    job = Job(
        id=new_job_id(REGION),
        tenant=tenant,
        kind=Kind.TEXT,
        model=work.model,
        lane=Lane.STANDARD,
        home=REGION,
        place=REGION,
        state=State.ACCEPTED,
        created_ms=now_ms,
        deadline_ms=now_ms + 600_000,
        prompt_tokens=len(prompt),
    )
    sampling = Sampling(max_tokens=work.max_tokens, seed=work.seed, ignore_eos=True)
    return job, sealer.seal(job, TextSpec(prompt_ids=prompt, sampling=sampling))
