"""How a worker consumes: each lane's queue with a prefetch of its own, and no steps that do not fit quorum queues."""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.entity import Queue
from kombu.messaging import Consumer as KombuConsumer

from brokers import names
from brokers.settings import load


class LaneConsumer(KombuConsumer):
    """Sets the prefetch before each queue's consumer: a quorum queue takes it per consumer, not per channel."""

    def _basic_consume(self, queue: Queue, *args: Any, **kwargs: Any) -> Any:
        if self.channel and (lane := names.lane_of(queue.name)):
            self.channel.basic_qos(0, load().prefetch(lane), False)
        return super()._basic_consume(queue, *args, **kwargs)


class LaneAMQP(AMQP):
    Consumer = LaneConsumer


class Consumer(CeleryConsumer):
    """Without the chatter between workers: revokes are durable in the store, so nobody need be asked at start."""

    class Blueprint(CeleryConsumer.Blueprint):
        # DelayedDelivery declares 28 queues for ETAs, which nothing here uses, as soon as it sees a quorum queue.
        default_steps = tuple(s for s in CeleryConsumer.Blueprint.default_steps if not s.endswith(":DelayedDelivery"))

    def __init__(self, *args: Any, worker_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        quiet = {"without_mingle": True, "without_gossip": True}
        super().__init__(*args, worker_options=(worker_options or {}) | quiet, **kwargs)
