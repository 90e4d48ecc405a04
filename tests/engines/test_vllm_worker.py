"""A whole worker in vLLM's environment: messages through RabbitMQ, streams in Redis, and a takeover in mid-text.

The model is the demo one where it has been imported, else the tiny random one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from brokers import names, status, topology
from brokers.job import Content, Control, Entry, Lane, Sampling
from brokers.settings import Settings
from compose import commands, probes
from compose.servers import Process
from tests.integration.test_worker import Client, end_of, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("vllm_installed"), pytest.mark.timeout(400)]

DEMO = "smollm2-135m-instruct"
GREEDY = Sampling(max_tokens=150, temperature=0, ignore_eos=True)
_START_S = 180.0


@pytest.fixture(scope="module")
def model(models_dir: Path, llama_folder: Path) -> str:
    origin = Path(os.environ.get("LINGBOT_TEST_MODELS") or Path(__file__).parents[2] / ".lingbot" / "models")
    if (origin / DEMO / "lingbot.json").is_file():
        (models_dir / DEMO).symlink_to(origin / DEMO)
        return DEMO
    shutil.copytree(llama_folder, models_dir / "llama")
    return "llama"


def vllm_worker(state: Path, settings: Settings, model: str, name: str) -> Process:
    return Process(
        name,
        commands.worker(settings, [model], name=name),
        env=commands.environment(state / "lingbot.toml", engine="vllm", kv_tokens=8192, slots=4, threads=1),
        log=state / "logs" / f"{name}.log",
        pid_file=state / "run" / f"{name}.pid",
    )


def wait_until_it_reports(settings: Settings, model: str, process: Process) -> None:
    deadline = time.monotonic() + _START_S
    while not probes.consumed(settings, names.queue(settings.region, model, Lane.STANDARD)):
        assert process.alive, process.tail(60)
        assert time.monotonic() < deadline, process.tail(60)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def worker(state: Path, settings: Settings, model: str) -> Iterator[Process]:
    topology.declare(settings, [model])
    process = vllm_worker(state, settings, model, "v1")
    process.spawn()
    try:
        wait_until_it_reports(settings, model, process)
        yield process
    finally:
        process.stop(grace_s=15)


@pytest.fixture
async def client(settings: Settings, worker: Process, model: str) -> AsyncIterator[Client]:
    client = Client(settings, model)
    await client.store.open()
    await client.publisher.open()
    await client.reader.open()
    yield client
    await client.reader.close()
    await client.publisher.close()
    await client.store.close()


async def read(client: Client, job: object, patience_s: float = 120) -> list[Entry]:
    async with asyncio.timeout(patience_s):
        return [entry async for entry in client.reader.tail(job, 0)]  # type: ignore[arg-type]


async def test_a_prompt_becomes_a_whole_stream(client: Client) -> None:
    job = await client.submit("The capital of France is", GREEDY, lives_s=300)
    found = await read(client, job)
    end = end_of(found)
    assert (end["status"], end["finish_reason"]) == ("succeeded", "length")
    assert end["usage"] == {"prompt_tokens": job.prompt_tokens, "completion_tokens": 150}
    ids = [token for entry in found if isinstance(entry, Content) for token in entry.token_ids]
    assert text_of(found) == client.model.tokenizer.decode(ids, skip_special_tokens=True)
    if client.model.card.name == DEMO:
        assert "Paris" in text_of(found)


async def test_it_says_which_engine_it_has_and_what_that_lacks(client: Client) -> None:
    reports = await status.workers(client.settings, client.store)
    (engine,) = [report["engines"][client.model.card.name] for report in reports if report["name"].startswith("v1.")]
    assert engine["engine"] == "vllm"
    assert set(engine["lacks"]) == {"pause", "keyed_sampling", "exact", "json_schema"}
    assert engine["stats"]["generated_tokens"] > 0


async def test_many_jobs_share_its_batch(client: Client) -> None:
    jobs = [await client.submit(f"Number {n}:", GREEDY, lives_s=300) for n in range(8)]
    ends = [end_of(found) for found in await asyncio.gather(*(read(client, job) for job in jobs))]
    assert {(end["status"], end["finish_reason"]) for end in ends} == {("succeeded", "length")}


async def test_a_cancel_reaches_vllm(client: Client) -> None:
    job = await client.submit("A very long story:", Sampling(max_tokens=1500, ignore_eos=True), lives_s=300)
    entries: list[Entry] = []
    async with asyncio.timeout(60):
        async for entry in client.reader.tail(job, 0):
            if isinstance(entry, Content) and not any(isinstance(earlier, Content) for earlier in entries):
                await client.store.cancel(job)
            entries.append(entry)
    assert isinstance(entries[-1], Control)
    assert entries[-1].data["status"] == "cancelled"


async def test_a_killed_worker_is_continued_by_another_and_leaves_nothing_behind(
    client: Client, worker: Process, state: Path, model: str
) -> None:
    whole = text_of(await read(client, await client.submit("Once upon a time", GREEDY, lives_s=300)))
    second = vllm_worker(state, client.settings, model, "v2")
    second.spawn()
    try:
        deadline = time.monotonic() + _START_S
        while not any(
            report["name"].startswith("v2.") and report["state"] == "ready"
            for report in await status.workers(client.settings, client.store)
        ):
            assert second.alive, second.tail(60)
            assert time.monotonic() < deadline, second.tail(60)
            await asyncio.sleep(0.5)
        jobs = [await client.submit("Once upon a time", GREEDY, lives_s=300) for _ in range(4)]
        readings = [asyncio.create_task(read(client, job)) for job in jobs]
        while not all([(record := await client.store.get(job.id)) and record.pos for job in jobs]):
            await asyncio.sleep(0.05)
        processes = psutil.Process(worker.pid).children(recursive=True)
        assert len(processes) >= 3
        os.kill(psutil.Process(processes[0].ppid()).pid, 9)  # the worker alone, not its group
        texts = [text_of(found) for found in await asyncio.gather(*readings)]
        attempts = [record.attempt for job in jobs if (record := await client.store.get(job.id))]
    finally:
        second.stop(grace_s=15)
    assert texts == [whole] * 4
    assert max(attempts) == 2  # those of the killed worker
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
