"""Queues as the broker holds them: what is refused says how to mend it, and no count of the broker's ends a job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from brokers import topology
from brokers.errors import ConfigurationError
from brokers.job import Lane
from brokers.settings import Settings
from compose import commands
from compose.cli import doctor
from compose.servers import Process, RabbitMQ
from compose.servers.rabbitmq import vhost
from tests.platform import APART_MODEL
from workers.weights.scripted import create_scripted_model

_REDELIVERIES = 25  # beyond the 20 after which RabbitMQ 4 would drop a message by itself


@pytest.fixture
def channel(settings: Settings) -> Iterator[BlockingChannel]:
    with topology.connection(settings, settings.region) as connection:
        yield connection.channel()


@pytest.fixture
def odd_queue(settings: Settings) -> Iterator[str]:
    """A queue of a worker's model that somebody declared with another length."""
    try:
        yield _declare_anew(settings, **{"x-max-length": 7})
    finally:
        _declare_anew(settings)


def _declare_anew(settings: Settings, **other: int) -> str:
    lane = topology.lane_queue(settings, settings.region, APART_MODEL, Lane.STANDARD)
    with topology.connection(settings, settings.region) as connection:
        channel = connection.channel()
        channel.queue_delete(lane.name)
        channel.queue_declare(lane.name, durable=True, arguments={**lane.arguments, **other})
    if not other:
        topology.declare(settings, [APART_MODEL])
    return lane.name


def _worker(state: Path, settings: Settings) -> Process:
    return Process(
        "odd",
        commands.worker(settings, [APART_MODEL], name="odd"),
        env=commands.environment(state / "lingbot.toml"),
        log=state / "logs" / "odd.log",
        pid_file=state / "run" / "odd.pid",
    )


def _wait_ready(process: Process) -> None:
    deadline = time.monotonic() + 30
    while "ready." not in process.log.read_text():
        assert process.alive, process.tail(30)
        assert time.monotonic() < deadline, process.tail(30)
        time.sleep(0.05)


def _ended(process: Process) -> str:
    deadline = time.monotonic() + 30
    while process.alive:
        assert time.monotonic() < deadline, process.tail(30)
        time.sleep(0.05)
    assert process.exit_code == 1
    return process.log.read_text()


def test_the_refusal_names_queue_both_values_and_the_repair(settings: Settings, odd_queue: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        topology.declare(settings, [APART_MODEL])
    assert odd_queue in refused.value.message
    assert "'100000'" in refused.value.message
    assert "'7'" in refused.value.message
    assert f"rabbitmqctl delete_queue {odd_queue}" in refused.value.advice


def test_the_doctor_names_queue_both_values_and_the_repair(settings: Settings, odd_queue: str, tmp_path: Path) -> None:
    create_scripted_model(tmp_path, APART_MODEL, {})
    with pytest.raises(doctor.Fault) as fault:
        doctor._queues(settings.model_copy(update={"models_dir": tmp_path}))
    assert all(word in str(fault.value) for word in (odd_queue, "x-max-length", "'100000'", "'7'"))
    assert "delete the queue" in fault.value.mend


def test_a_worker_that_meets_other_arguments_says_so_and_ends(state: Path, settings: Settings, odd_queue: str) -> None:
    """Celery by itself would connect again for ever, several times a second."""
    process = _worker(state, settings)
    process.spawn()
    try:
        log = _ended(process)
    finally:
        process.kill()
    assert f"rabbitmqctl delete_queue {odd_queue}" in log
    assert "Trying to re-establish" not in log


def test_a_worker_whose_queue_is_changed_under_it_says_so_and_ends(
    state: Path, settings: Settings, rabbitmq: RabbitMQ
) -> None:
    topology.declare(settings, [APART_MODEL])
    process = _worker(state, settings)
    process.log.unlink(missing_ok=True)
    process.spawn()
    try:
        _wait_ready(process)
        os.kill(process.pid, signal.SIGSTOP)  # or it would declare the queue itself, between our two steps
        queue = _declare_anew(settings, **{"x-max-length": 7})
        rabbitmq.ctl("close_all_connections", "--vhost", vhost(settings.region), "so that it connects again")
        os.kill(process.pid, signal.SIGCONT)
        log = _ended(process)
    finally:
        process.kill()
        _declare_anew(settings)
    assert f"rabbitmqctl delete_queue {queue}" in log


def test_a_message_is_delivered_more_often_than_a_broker_would_count(
    settings: Settings, channel: BlockingChannel
) -> None:
    topology.declare(settings, ["often"])
    queue = topology.lane_queue(settings, settings.region, "often", Lane.STANDARD)
    assert queue.arguments["x-delivery-limit"] > 1000  # unset is 20 on RabbitMQ 4, and -1 is none at all on 3.10
    channel.confirm_delivery()
    channel.basic_publish(queue.exchange, queue.routing_key, b"again", mandatory=True)
    for _ in range(_REDELIVERIES):
        delivery, body = _get(channel, queue.name)
        assert body == b"again"
        channel.basic_nack(delivery, requeue=True)
    delivery, _ = _get(channel, queue.name)
    channel.basic_ack(delivery)


def _get(channel: BlockingChannel, queue: str) -> tuple[int, bytes]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        method, _, body = channel.basic_get(queue)
        if isinstance(method, pika.spec.Basic.GetOk):
            return int(method.delivery_tag), bytes(body)
    raise AssertionError(f"nothing in {queue}")
