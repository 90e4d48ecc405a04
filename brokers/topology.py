"""RabbitMQ's exchanges, queues and bindings as data; declare them, check them.

    gen (direct) --<model>.<lane>--> gen.<region>.<model>.<lane> (quorum)  --rejected--> gen.dead (fanout)
                                                                           gen.dead --> gen.<region>.dead (quorum)

Lanes are queues because quorum queues ignore message priorities. The same arguments hold on RabbitMQ 3.10 and 4.x.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError, ChannelClosedByBroker

from brokers import names
from brokers.errors import BrokerUnavailable, ConfigurationError
from brokers.job import Lane
from brokers.settings import Settings

_NEVER = 1_000_000
"""x-delivery-limit. A broker's count includes dropped connections and broker restarts, so it says nothing about
poison, which is counted by claims; 4.x would default to 20, and -1 dead-letters at once on 3.10."""


_HELD_S = 8 * 3600


class QueueSpec(NamedTuple):
    """One queue and how it is bound."""

    name: str
    exchange: str
    routing_key: str
    arguments: dict[str, Any]


def held_s(settings: Settings) -> int:
    """How long a worker may hold a message: longer than any job lives. One that holds it longer than the broker's
    timeout loses its channel, on RabbitMQ 4.3 for good. Before 3.12 a broker does not know that timeout of a queue;
    then it has to stand in its configuration."""
    return max(_HELD_S, settings.max_expires_s + 3600)


def lane_queue(settings: Settings, region: str, model: str, lane: Lane) -> QueueSpec:
    arguments = {
        "x-queue-type": "quorum",
        "x-delivery-limit": _NEVER,
        "x-max-length": settings.queue_max_length,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": names.DEAD_EXCHANGE,
        "x-consumer-timeout": 1000 * held_s(settings),
    }
    return QueueSpec(names.queue(region, model, lane), names.EXCHANGE, names.routing_key(model, lane), arguments)


def dead_queue(region: str) -> QueueSpec:
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": _NEVER}  # who looks at a message delivers it
    return QueueSpec(names.dead_queue(region), names.DEAD_EXCHANGE, "", arguments)


def queues(settings: Settings, region: str, models: Iterable[str]) -> list[QueueSpec]:
    lanes = [lane_queue(settings, region, model, lane) for model in models for lane in Lane]
    return [*lanes, dead_queue(region)]


def parameters(url: str, timeout_s: float = 5.0) -> pika.URLParameters:
    """How to connect, with a bound on every phase of it."""
    found = pika.URLParameters(url)
    found.socket_timeout = found.stack_timeout = found.blocked_connection_timeout = timeout_s
    found.heartbeat = 10
    found.connection_attempts = 1
    return found


def declare(settings: Settings, models: Iterable[str], region: str | None = None) -> None:
    """Make everything exist. Raises ConfigurationError when a queue exists with other arguments."""
    region = region or settings.region
    with connection(settings, region) as opened:
        channel = opened.channel()
        channel.exchange_declare(names.EXCHANGE, "direct", durable=True)
        channel.exchange_declare(names.DEAD_EXCHANGE, "fanout", durable=True)
        for queue in queues(settings, region, models):
            if fault := _declare_queue(channel, queue):
                raise ConfigurationError(fault, hint=_repair(queue.name))


def check(settings: Settings, models: Iterable[str], region: str | None = None) -> list[str]:
    """What is wrong with the queues, one sentence each, without changing anything that exists."""
    region = region or settings.region
    with connection(settings, region) as opened:
        found = [_fault(opened, queue) for queue in queues(settings, region, models)]
    return [fault for fault in found if fault]


def _fault(connection: pika.BlockingConnection, queue: QueueSpec) -> str | None:
    # A channel each: the broker closes the channel with every refusal.
    return _missing(connection.channel(), queue) or _declare_queue(connection.channel(), queue)


def _declare_queue(channel: BlockingChannel, queue: QueueSpec) -> str | None:
    try:
        channel.queue_declare(queue.name, durable=True, arguments=queue.arguments)
        channel.queue_bind(queue.name, queue.exchange, queue.routing_key)
    except ChannelClosedByBroker as closed:
        return _fault_of(queue.name, closed.reply_text)
    return None


def refused(reply: str) -> ConfigurationError:
    """What a 406 to the declaration of a queue means; `reply` is the broker's text."""
    named = re.search(r"queue '(.+?)'", reply)
    name = named[1] if named else "(see the broker's log)"
    return ConfigurationError(_fault_of(name, reply), hint=_repair(name))


def _fault_of(name: str, reply: str) -> str:
    # The broker says both values: inequivalent arg 'x' for queue 'q': received '1' but current is '2'
    return f"queue {name} exists with other arguments: {reply}."


def _repair(name: str) -> str:
    return (
        f"Restore the setting, or let the queue run empty, then `rabbitmqctl delete_queue {name}` (in its vhost) "
        "and `lingbot declare`."
    )


def _missing(channel: BlockingChannel, queue: QueueSpec) -> str | None:
    try:
        channel.queue_declare(queue.name, passive=True)
    except ChannelClosedByBroker:
        return f"queue {queue.name} does not exist"
    return None


@contextmanager
def connection(settings: Settings, region: str) -> Iterator[pika.BlockingConnection]:
    """A connection for a few commands. Raises BrokerUnavailable when there is none to be had."""
    try:
        opened = pika.BlockingConnection(parameters(settings.reach(region).amqp.get_secret_value()))
    except (AMQPError, AMQPConnectorException, OSError) as error:  # the second: a broker that hangs
        raise BrokerUnavailable(f"RabbitMQ of region {region} cannot be reached: {type(error).__name__}") from error
    try:
        yield opened
    finally:
        if opened.is_open:
            opened.close()
