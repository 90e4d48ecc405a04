"""A real worker whose engine process dies or hangs over some of its jobs: they end, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from brokers import management, names, topology
from brokers.job import Sampling, State
from brokers.settings import Settings
from brokers.status import workers
from compose import commands
from compose.servers import Process
from tests.integration.test_worker import Client, end_of, text_of, wait_until_it_consumes
from tests.platform import APART_MODEL

SAMPLING = Sampling(max_tokens=60, seed=9, ignore_eos=True)


@pytest.fixture(scope="module")
def worker(state: Path, settings: Settings) -> Iterator[Process]:
    topology.declare(settings, [APART_MODEL])
    process = Process(
        "fragile",
        commands.worker(settings, [APART_MODEL], name="fragile"),
        env=commands.environment(state / "lingbot.toml", engine_hang_s=2.0),
        log=state / "logs" / "fragile.log",
        pid_file=state / "run" / "fragile.pid",
    )
    process.spawn()
    try:
        wait_until_it_consumes(process, settings)
        yield process
    finally:
        process.stop(grace_s=10)


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


async def dead_letters(settings: Settings) -> int:
    return (await management.depths(settings, settings.region)).get(names.dead_queue(settings.region), 0)


@pytest.mark.parametrize("order", ["!crash@0", "!crash@1", "!crash@20"])
async def test_a_poison_job_ends_alone(client: Client, order: str) -> None:
    before = await dead_letters(client.settings)
    poison = await client.submit(f"poison {order}", SAMPLING)
    others = [await client.submit(f"innocent {n} !slow@1", SAMPLING) for n in range(15)]
    found = await asyncio.gather(*(client.read(job) for job in others))
    assert {str(end_of(one)["status"]) for one in found} == {"succeeded"}
    end = end_of(await client.read(poison))
    assert end["status"] == "failed"
    assert end["error"] == {
        "code": "poison",
        "message": "The job was given up: workers died over it again and again.",
    }
    records = [await client.store.get(job.id) for job in others]
    assert {record.attempt for record in records if record} == {1}
    async with asyncio.timeout(15):
        while await dead_letters(client.settings) == before:
            await asyncio.sleep(0.2)


async def test_an_engine_that_hangs_is_restarted_and_its_jobs_go_on(client: Client) -> None:
    hanging = await client.submit("stuck !hang@10", SAMPLING)
    others = [await client.submit(f"waiting {n}", SAMPLING) for n in range(4)]
    again = [await client.submit(f"waiting {n}", SAMPLING) for n in range(4)]
    texts = [text_of(found) for found in await asyncio.gather(*(client.read(job) for job in [*others, *again]))]
    assert texts[:4] == texts[4:]
    assert end_of(await client.read(hanging))["error"] == {
        "code": "poison",
        "message": "The job was given up: workers died over it again and again.",
    }


async def test_an_engine_that_will_not_start_takes_its_model_out_until_it_does(
    client: Client, worker: Process, settings: Settings
) -> None:
    """Its card is broken, then its engine killed: three starts fail, and the jobs wait for somebody who can."""

    async def state() -> str:
        reports = await workers(settings, client.store)
        return next((str(report["state"]) for report in reports if report["name"].startswith("fragile.")), "none")

    async def state_becomes(wanted: str, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while wanted != await state():
                await asyncio.sleep(0.2)

    await state_becomes("ready", 10)
    card = settings.models_dir / APART_MODEL / "lingbot.json"
    whole = card.read_text()
    job = await client.submit("waits !slow@5", Sampling(max_tokens=400, seed=9, ignore_eos=True))
    await asyncio.sleep(0.5)
    try:
        card.write_text(whole.replace('"engine": "scripted"', '"engine": "broken"'))
        children = psutil.Process(worker.pid).children(recursive=True)
        (engine,) = [child for child in children if "workers.engine.child" in child.cmdline()]
        engine.kill()
        await state_becomes("out_of_service", 30)
        async with asyncio.timeout(10):
            while (record := await client.store.get(job.id)) and record.state is not State.QUEUED:
                await asyncio.sleep(0.1)
    finally:
        card.write_text(whole)
    await state_becomes("ready", 45)
    assert end_of(await client.read(job))["status"] == "succeeded"
