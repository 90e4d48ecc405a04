"""The store as a Redis Cluster: every call finds its server, and one that dies or gives slots away is no gap."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from redis.crc import key_slot

from brokers import calls, connect, names
from brokers.errors import ConfigurationError, StoreUnavailable
from brokers.job import Job, State
from brokers.reconciler import Reconciler
from brokers.settings import Settings
from brokers.store import Store
from compose import config
from compose.servers import PortBook, Valkey, ValkeyCluster
from tests.integration import lives
from tests.integration.test_store import make_job
from tests.integration.test_streams import Writing, queued
from tests.platform import Platform
from workers.weights.scripted import create_scripted_model

MODEL = "clustered"  # a queue of its own: the suite's other platform may run on the same broker


@pytest.fixture(scope="module")
def cluster(state: Path) -> Iterator[ValkeyCluster]:
    with ValkeyCluster(state / "cluster", replicas=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clustered(settings: Settings, cluster: ValkeyCluster) -> Settings:
    return lives.at(settings, cluster.url)


@pytest.fixture
async def store(clustered: Settings) -> AsyncIterator[Store]:
    store = Store(clustered)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def writing(clustered: Settings) -> Iterator[Writing]:
    writing = Writing(clustered)
    yield writing
    writing.writer.close()


def slot_of(job: Job, settings: Settings) -> int:
    return int(key_slot(calls.keys(job, settings.partitions).record.encode()))


async def one_job_on_each(store: Store, cluster: ValkeyCluster, settings: Settings) -> dict[Valkey, Job]:
    """A queued job on every server that serves."""
    found: dict[Valkey, Job] = {}
    while len(found) < len(cluster.primaries):
        job = await queued(store, settings)
        found.setdefault(cluster.serving(slot_of(job, settings)), job)
    return found


def test_the_functions_are_on_every_primary(store: Store, clustered: Settings) -> None:
    with connect.blocking(clustered, clustered.region, timeout_s=5) as client:
        primaries = connect.primaries(client)
        assert len(primaries) == 3
        assert all(primary.function_list(names.FUNCTION_LIBRARY) for primary in primaries)


async def test_a_server_that_began_anew_gets_its_functions(
    store: Store, cluster: ValkeyCluster, clustered: Settings
) -> None:
    for primary in cluster.primaries:
        primary._probe.function_flush()
    with pytest.raises(StoreUnavailable):
        await store.create(make_job(clustered), b"")
    await asyncio.sleep(0.5)
    await store.create(make_job(clustered), b"")
    for primary in cluster.primaries:
        primary._probe.function_flush()
    job = make_job(clustered)
    with connect.blocking(clustered, clustered.region, timeout_s=5) as client:
        call = calls.create(job, b"", calls.keys(job, clustered.partitions), clustered)
        with pytest.raises(connect.ERRORS):
            connect.send(client, call)
        assert connect.send(client, call) is True


async def test_one_server_that_evicts_is_enough_to_be_refused(
    store: Store, cluster: ValkeyCluster, clustered: Settings
) -> None:
    replica = cluster.nodes["replica0of1"]._probe
    replica.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with (
            connect.blocking(clustered, clustered.region, timeout_s=5) as client,
            pytest.raises(ConfigurationError, match="evicts"),
        ):
            connect.prepare(client, clustered)
    finally:
        replica.config_set("maxmemory-policy", "noeviction")


async def test_jobs_live_their_whole_life(clustered: Settings) -> None:
    await lives.a_whole_life(clustered)


async def test_a_job_is_listed_cancelled_and_erased(clustered: Settings) -> None:
    await lives.a_job_is_listed_cancelled_and_erased(clustered)


async def test_a_lost_job_is_found(clustered: Settings) -> None:
    await lives.a_lost_job_is_found(clustered)


async def test_a_cancel_is_heard_from_every_server(
    store: Store, cluster: ValkeyCluster, clustered: Settings, writing: Writing
) -> None:
    jobs = list((await one_job_on_each(store, cluster, clustered)).values())
    for job in jobs:
        writing.own(job)
    heard = await asyncio.to_thread(lives.cancels_are_heard, clustered, jobs)
    assert heard == {job.id for job in jobs}


async def test_slots_that_move_in_mid_stream_are_followed(
    store: Store, cluster: ValkeyCluster, clustered: Settings, writing: Writing
) -> None:
    job = await queued(store, clustered)
    async with lives.opened(clustered) as (_, reader):
        listener = lives.Listener(reader, job)
        dictation = lives.Dictation(writing, [job], tokens=400, pause_s=0.005)
        dictation.start()
        await asyncio.sleep(0.4)
        slot = slot_of(job, clustered)
        source = cluster.serving(slot)
        target = next(node for node in cluster.primaries if node is not source)
        await asyncio.to_thread(move_slot, cluster, slot, source, target)
        assert cluster.serving(slot) is target
        await dictation.written()
        assert await listener.text(timeout_s=15) == dictation.text
    assert await store.get(job.id)


def move_slot(cluster: ValkeyCluster, slot: int, source: Valkey, target: Valkey) -> None:
    """As an operator's tool does, with a pause while the slot is on neither side alone."""

    def ask(node: Valkey, *command: Any) -> Any:
        return node._probe.execute_command(*command)  # type: ignore[no-untyped-call]

    ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID"))
    ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID"))
    while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
        ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "AUTH", cluster.password, "KEYS", *keys)
        time.sleep(0.1)
    for node in (target, source):
        ask(node, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_dies_takes_its_own_jobs_only_and_not_for_long(
    store: Store, cluster: ValkeyCluster, clustered: Settings, writing: Writing, how: signal.Signals
) -> None:
    jobs = await one_job_on_each(store, cluster, clustered)
    victim = cluster.serving(slot_of(next(iter(jobs.values())), clustered))
    async with lives.opened(clustered) as (_, reader):
        listeners = {node: lives.Listener(reader, job) for node, job in jobs.items()}
        dictation = lives.Dictation(writing, list(jobs.values()), tokens=800, pause_s=0.01)
        dictation.start()
        await asyncio.sleep(1.0)
        os.killpg(victim.process.pid, how)
        await asyncio.sleep(0.3)
        await others_answer(store, jobs, victim)
        await dictation.written()
        for listener in listeners.values():
            assert await listener.text(timeout_s=20) == dictation.text
        # One that hangs holds a round of the writer for as long as it is waited for, then only its own streams.
        most_s = 1.5 if how is signal.SIGKILL else 2 * clustered.store_timeout_s + 1.0
        assert max(max(listener.gaps_s) for node, listener in listeners.items() if node is not victim) < most_s
        assert cluster.serving(slot_of(jobs[victim], clustered)) is not victim
    victim.kill()
    victim.start()
    cluster.wait_until("the Cluster is whole", cluster._whole)


async def test_the_reconciler_finds_what_the_other_servers_have_while_one_is_away(
    store: Store, cluster: ValkeyCluster, clustered: Settings
) -> None:
    jobs = await one_job_on_each(store, cluster, clustered)
    victim, *others = jobs
    sleeping = clustered.model_copy(update={"store_timeout_s": 1.2})
    reconciler = Reconciler(sleeping)
    await reconciler.open()
    await reconciler.sweep()  # now it knows who has which slots; the first server it would ask is the one to freeze
    with connect.blocking(clustered, clustered.region, timeout_s=5) as client:
        for job in jobs.values():
            keys = calls.keys(job, clustered.partitions)
            connect.send(client, calls.Call(("HSET", keys.record, "cancel", 1), bool))
            connect.send(client, calls.Call(("ZADD", keys.live, 1, job.id), bool))
    os.killpg(victim.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            await reconciler.sweep()
        found = [await store.get(jobs[node].id) for node in others]
        assert [job and job.state for job in found] == [State.CANCELLED] * len(others)
    finally:
        os.killpg(victim.process.pid, signal.SIGCONT)
        await reconciler.close()
    cluster.wait_until("the Cluster is whole", cluster._whole)


async def others_answer(store: Store, jobs: dict[Valkey, Job], victim: Valkey) -> None:
    began = time.monotonic()
    asked = map(store.get, [job.id for job in jobs.values()])
    results = dict(zip(jobs, await asyncio.gather(*asked, return_exceptions=True), strict=True))
    assert time.monotonic() - began < 1.5
    assert isinstance(results.pop(victim), StoreUnavailable)
    assert all(isinstance(result, Job) for result in results.values())


async def test_a_cluster_that_is_away_is_unavailable_in_time(settings: Settings, ports: PortBook) -> None:
    nowhere = lives.at(settings, f"redis+cluster://127.0.0.1:{ports.take('nobody')}")
    store = Store(nowhere)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.get(make_job(settings).id)
    assert time.monotonic() - began < 1.5
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()


@pytest.fixture(scope="module")
def clustered_platform(state: Path, clustered: Settings, ports: PortBook) -> Iterator[Platform]:
    """API, worker and reconciler as processes, their store a Cluster."""
    folder = state / "clustered"
    create_scripted_model(folder / "models", MODEL, {"directives": True})
    wanted = {
        "region": clustered.region,
        "regions": {clustered.region: {name: value for name, value in _open(clustered).items() if value}},
        "models_dir": folder / "models",
        "runtime_dir": folder / "run",
        "seal_keys": {name: key.get_secret_value() for name, key in clustered.seal_keys.items()},
        "port": ports.take("clustered-api"),
    }
    (folder / "lingbot.toml").write_text(config.to_toml(wanted))
    settings = clustered.model_copy(update={"port": wanted["port"], "models_dir": folder / "models"})
    platform = Platform(folder, settings, MODEL, worker_name="clustered")
    try:
        platform.start()
        yield platform
    finally:
        platform.stop()


def _open(settings: Settings) -> dict[str, str | None]:
    here = settings.here
    management = here.management.get_secret_value() if here.management else None
    return {"amqp": here.amqp.get_secret_value(), "redis": here.redis.get_secret_value(), "management": management}


def test_the_whole_platform_works_over_a_cluster(clustered_platform: Platform) -> None:
    headers = {"Authorization": f"Bearer {clustered_platform.api_key}"}
    with httpx.Client(base_url=clustered_platform.base_url, headers=headers, timeout=20, trust_env=False) as client:
        jobs = [submitted(client, f"job {n}") for n in range(12)]
        texts = [streamed(client, job) for job in jobs]
        assert all(texts)
        listed = client.get("/v1/jobs", params={"limit": 50}).json()
        assert {job["id"] for job in listed["data"]} == set(jobs)
        assert {client.get(f"/v1/jobs/{job}").json()["status"] for job in jobs} == {"succeeded"}
        assert client.get("/readyz").is_success


def submitted(client: httpx.Client, prompt: str) -> str:
    answer = client.post("/v1/jobs", json={"model": MODEL, "prompt": prompt, "max_tokens": 30})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def streamed(client: httpx.Client, job: str) -> str:
    text = ""
    with connect_sse(client, "GET", f"/v1/jobs/{job}/events") as events:
        for event in events.iter_sse():
            if event.event == "token":
                text += event.json()["text"]
            if event.event == "end":
                assert event.json()["status"] == "succeeded"
                break
    return text
