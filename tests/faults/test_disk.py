"""The disk is full where data is written: a clear error, and nothing half-written is read."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brokers.errors import LingbotError, StoreUnavailable
from brokers.job import Job
from brokers.models import Registry
from brokers.settings import Region, Settings
from brokers.store import Store
from compose.servers import Valkey
from tests.faults.conftest import Tell
from tests.faults.rig import REGION, Servers
from tests.integration.test_store import make_job
from workers.weights.importer import import_model

_SPEC = b"\x5a" * 4096


@contextmanager
def _tiny_disk(folder: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_disk_of_redis_is_full(shared: Servers, tell: Tell, tmp_path: Path) -> None:
    valkey = Valkey(tmp_path / "valkey")
    with _tiny_disk(tmp_path / "valkey" / "data") as disk, valkey:
        filler = disk / "filler"
        filler.write_bytes(bytes(256 << 10))
        region = Region.model_validate({"amqp": "amqp://nowhere", "redis": valkey.url})
        settings = Settings(region=REGION, regions={REGION: region}, models_dir=shared.models_dir)
        acknowledged, refusal = asyncio.run(_create_until_refused(settings))
        filler.unlink()
        acknowledged.append(asyncio.run(_create_again(settings)))
        valkey.kill()
        valkey.start()
        assert asyncio.run(_read_back(settings, acknowledged)) == acknowledged
    tell(
        "disk full (tmpfs of 1 MB) under Redis",
        f"after {len(acknowledged) - 1} jobs the next is refused ({refusal.message.rstrip('.')}); with room again it "
        "goes on by itself, and after a kill all of them are there, whole",
    )


def test_the_disk_of_the_models_is_full(shared: Servers, tell: Tell, tmp_path: Path) -> None:
    source = tmp_path / "source"
    _write_model(source)
    with _tiny_disk(tmp_path / "models") as origin:
        with pytest.raises((LingbotError, OSError)) as told:
            import_model(source, "big", origin)
        assert "space" in str(told.value).lower()
        assert list(Registry(origin).all()) == []
        assert list(origin.iterdir()) == []
    tell("disk full (tmpfs of 1 MB) under the models", f"the import says: {told.value}; no part of it stays")


async def _create_until_refused(settings: Settings) -> tuple[list[Job], StoreUnavailable]:
    store = Store(settings)
    await store.open()
    acknowledged: list[Job] = []
    try:
        while len(acknowledged) < 2000:
            job = make_job(settings)
            await store.create(job, _SPEC)
            acknowledged.append(job)
    except StoreUnavailable as error:
        return acknowledged, error
    finally:
        await store.close()
    raise AssertionError("8 MB went onto a disk of 1 MB")


async def _create_again(settings: Settings) -> Job:
    """A job, as soon as the store takes one again."""
    store = Store(settings)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    job = make_job(settings)
                    await store.create(job, _SPEC)
                except StoreUnavailable:
                    await asyncio.sleep(0.1)
                else:
                    return job
    finally:
        await store.close()


async def _read_back(settings: Settings, jobs: list[Job]) -> list[Job | None]:
    store = Store(settings)
    try:
        return [await store.get(job.id) for job in jobs]
    finally:
        await store.close()


def _write_model(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({"weight": np.zeros(1 << 20, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8}'
    )
    (folder / "tokenizer.json").write_text("{}")
