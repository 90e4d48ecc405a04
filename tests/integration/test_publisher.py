"""Confirmed publishing against a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from brokers import management, names, topology
from brokers.errors import BrokerUnavailable, ConfigurationError, QueueFull, Unroutable
from brokers.job import Job, Lane
from brokers.publisher import Publisher
from brokers.settings import Settings
from compose.servers import RabbitMQ
from tests.integration.test_store import make_job


@pytest.fixture
async def publisher(settings: Settings) -> AsyncIterator[Publisher]:
    publisher = Publisher(settings)
    await publisher.open()
    yield publisher
    await publisher.close()


async def depth_reaches(settings: Settings, queue: str, wanted: int) -> bool:
    for _ in range(100):
        if (await management.depths(settings, settings.region)).get(queue) == wanted:
            return True
        await asyncio.sleep(0.1)
    return False


async def publish_until_refused(publisher: Publisher, job: Job, most: int) -> None:
    for _ in range(most):
        await publisher.publish(job, b"")


async def test_confirmed_messages_are_in_their_lanes_queue(publisher: Publisher, settings: Settings) -> None:
    await publisher.ensure(["confirmed"])
    jobs = [msgspec.structs.replace(make_job(settings), model="confirmed") for _ in range(300)]
    await asyncio.gather(*(publisher.publish(job, b"sealed") for job in jobs))
    assert await depth_reaches(settings, names.queue(settings.region, "confirmed", Lane.STANDARD), 300)


async def test_a_message_without_a_queue_is_unroutable(publisher: Publisher, settings: Settings) -> None:
    with pytest.raises(Unroutable):
        await publisher.publish(msgspec.structs.replace(make_job(settings), model="nowhere"), b"")


async def test_a_full_queue_says_so_and_its_neighbours_get_theirs(publisher: Publisher, settings: Settings) -> None:
    small = settings.model_copy(update={"queue_max_length": 5})
    await asyncio.to_thread(topology.declare, small, ["full"])
    await publisher.ensure(["roomy"])
    full, roomy = (msgspec.structs.replace(make_job(settings), model=model) for model in ("full", "roomy"))
    with pytest.raises(QueueFull):
        await publish_until_refused(publisher, full, 500)  # quorum queues notice their length with a short delay
    await publisher.publish(roomy, b"")


@pytest.mark.parametrize("max_expires_s", [60, 6 * 3600, 30 * 3600])
def test_a_message_may_be_held_for_longer_than_the_longest_deadline(settings: Settings, max_expires_s: int) -> None:
    queue = topology.lane_queue(
        settings.model_copy(update={"max_expires_s": max_expires_s}), "local", "scripted", Lane.BATCH
    )
    assert queue.arguments["x-consumer-timeout"] > max_expires_s * 1000


async def test_other_arguments_are_refused_with_both_values(settings: Settings) -> None:
    await asyncio.to_thread(topology.declare, settings, ["twice"])
    other = settings.model_copy(update={"queue_max_length": 7})
    with pytest.raises(ConfigurationError, match=r"x-max-length.*'7'.*'100000'"):
        await asyncio.to_thread(topology.declare, other, ["twice"])
    faults = await asyncio.to_thread(topology.check, other, ["twice"])
    assert len(faults) == len(Lane)


async def test_a_broker_that_is_killed_fails_publishes_in_time_and_is_used_again(
    publisher: Publisher, settings: Settings, rabbitmq: RabbitMQ
) -> None:
    await publisher.ensure(["bounced"])
    job = msgspec.structs.replace(make_job(settings), model="bounced")
    await publisher.publish(job, b"")
    rabbitmq.kill()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        await publisher.publish(job, b"")
    assert time.monotonic() - began < 1.5
    rabbitmq.start()
    async with asyncio.timeout(15):
        while not publisher.connected:
            await asyncio.sleep(0.05)
    await publisher.publish(job, b"")


async def test_a_memory_alarm_fails_publishes_at_once_and_clears(
    publisher: Publisher, settings: Settings, rabbitmq: RabbitMQ
) -> None:
    await publisher.ensure(["alarmed"])
    job = msgspec.structs.replace(make_job(settings), model="alarmed")
    await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "0")
    try:
        with pytest.raises(BrokerUnavailable):
            await publish_until_refused(publisher, job, 50)  # the broker tells of its alarm at the next publish
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            await publisher.publish(job, b"")
        assert time.monotonic() - began < 1.5
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "0.6")
    async with asyncio.timeout(10):
        while not publisher.connected:
            await asyncio.sleep(0.05)
    await publisher.publish(job, b"")
