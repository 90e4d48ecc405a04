"""The documented backup and restore: from the store's files and the seal keys alone, with an empty broker."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from brokers import topology
from brokers.chunk_reader import ChunkReader
from brokers.job import Content, Job, Sampling, TextSpec
from brokers.models import Registry
from brokers.reconciler import Reconciler
from brokers.seal import Sealer
from brokers.settings import Region, Settings
from brokers.store import Store
from compose import commands, config
from compose.servers import PortBook, Process, RabbitMQ, Valkey
from tests.integration.test_store import make_job
from tests.integration.test_worker import wait_until_it_consumes
from tests.platform import APART_MODEL


def moved(settings: Settings, valkey: Valkey, rabbitmq: RabbitMQ) -> Settings:
    """The same region on other servers."""
    reach = {"amqp": rabbitmq.url("local"), "redis": valkey.url, "management": rabbitmq.management_url}
    return settings.model_copy(
        update={"regions": {"local": Region.model_validate(reach)}, "queued_check_s": 1.0, "accepted_grace_s": 1.0}
    )


def backup(valkey: Valkey, folder: Path) -> None:
    """As docs/operations.md says: no rewrite of the append-only file meanwhile, then its folder is copied."""
    valkey._probe.config_set("auto-aof-rewrite-percentage", 0)
    while valkey._probe.info("persistence")["aof_rewrite_in_progress"]:
        time.sleep(0.05)
    time.sleep(1.1)  # it is synced each second
    shutil.copytree(valkey.folder / "data", folder / "data")


@pytest.fixture
def two_sites(tmp_path: Path, ports: PortBook) -> Iterator[tuple[Valkey, RabbitMQ]]:
    """The store that will be lost, and the empty broker of the site that takes over."""
    with ExitStack() as stack:
        first = stack.enter_context(Valkey(tmp_path / "first", ports=PortBook()))
        broker = stack.enter_context(RabbitMQ(tmp_path / "broker", regions=["local"], ports=PortBook()))
        yield first, broker


def start_worker(folder: Path, settings: Settings) -> Process:
    values = settings.model_dump(include={"region", "models_dir", "runtime_dir"})
    secrets = {key: value.get_secret_value() for key, value in settings.seal_keys.items()}
    reach = settings.regions["local"]
    urls = {name: getattr(reach, name).get_secret_value() for name in ("amqp", "redis", "management")}
    (folder / "lingbot.toml").write_text(config.to_toml({**values, "seal_keys": secrets, "regions": {"local": urls}}))
    process = Process(
        "restored",
        commands.worker(settings, [APART_MODEL], name="restored"),
        env=commands.environment(folder / "lingbot.toml"),
        log=folder / "restored.log",
        pid_file=folder / "restored.pid",
    )
    process.spawn()
    wait_until_it_consumes(process, settings)
    return process


async def accept(settings: Settings, count: int) -> list[Job]:
    """Jobs whose messages are about to be lost with their broker."""
    store, sealer = Store(settings), Sealer(settings)
    await store.open()
    ids = Registry(settings.models_dir).get(APART_MODEL).encode("restored")
    jobs = []
    for _ in range(count):
        job = msgspec.structs.replace(make_job(settings), model=APART_MODEL, prompt_tokens=len(ids))
        spec = TextSpec(prompt_ids=ids, sampling=Sampling(max_tokens=20, seed=1, ignore_eos=True))
        await store.create(job, sealer.seal(job, spec))
        await store.queued(job)
        jobs.append(job)
    await store.close()
    return jobs


async def recover(settings: Settings, jobs: list[Job]) -> list[str]:
    """Let a reconciler sweep until every job has ended; their texts."""
    reconciler, reader, store = Reconciler(settings), ChunkReader(settings), Store(settings)
    await reconciler.open()
    await reader.open()
    texts = []
    async with asyncio.timeout(60):
        while not all(record and record.ended for record in [await store.get(job.id) for job in jobs]):
            await reconciler.sweep()
            await asyncio.sleep(0.5)
        for job in jobs:
            entries = [entry async for entry in reader.tail(job)]
            texts.append("".join(entry.text for entry in entries if isinstance(entry, Content)))
    await reader.close()
    await store.close()
    return texts


@pytest.mark.timeout(180)
async def test_the_store_and_the_seal_keys_bring_every_job_back(
    settings: Settings, two_sites: tuple[Valkey, RabbitMQ], tmp_path: Path
) -> None:
    lost, broker = two_sites
    jobs = await accept(moved(settings, lost, broker), 20)
    backup(lost, tmp_path / "second")
    lost.kill()
    with Valkey(tmp_path / "second", ports=PortBook()) as restored:
        site = moved(settings, restored, broker)
        topology.declare(site, [APART_MODEL])
        worker = start_worker(tmp_path, site)
        try:
            texts = await recover(site, jobs)
        finally:
            worker.stop(grace_s=10)
    assert len(set(texts)) == 1
    assert len(texts[0].encode()) >= 20
