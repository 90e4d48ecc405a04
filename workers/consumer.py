"""How a worker consumes: each lane's queue with a prefetch of its own, and no steps that do not fit quorum queues.

A message that is no job's goes to the dead-letter queue before Celery sees it: some bodies that Celery cannot take
apart end its worker, and come back to the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from amqp import spec
from amqp.exceptions import PreconditionFailed
from celery.app.amqp import AMQP
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.entity import Queue
from kombu.message import Message
from kombu.messaging import Consumer as KombuConsumer

from brokers import envelope, names, topology
from brokers.settings import load
from workers import runtime

log = logging.getLogger(__name__)


class LaneConsumer(KombuConsumer):
    """Sets the prefetch before each queue's consumer: a quorum queue takes it per consumer, not per channel.

    Of a worker that drains, nothing is consumed when its connection comes back: it would hand back all it gets, and get
    it again.
    """

    def _basic_consume(self, queue: Queue, *args: Any, **kwargs: Any) -> Any:
        worker = runtime.current()
        if worker and worker.draining.is_set():
            return None
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

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """A queue that came to have other arguments is refused each time: an operator has to mend it. Not every 406 is
        of this kind; an acknowledgement that comes too late is one too."""
        if isinstance(exc, PreconditionFailed) and exc.method_sig == spec.Queue.Declare:
            refusal = topology.refused(str(exc.reply_text))
            log.critical("%s %s", refusal.message, refusal.advice)
            raise SystemExit(1)
        super().on_connection_error_after_connected(exc)

    def create_task_handler(self) -> Callable[[Message], Any]:
        handle = super().create_task_handler()

        def on_message(message: Message) -> Any:
            if fault := envelope.fault(message.headers, message.body):
                log.error("a message that is no job's goes to the dead letters: %s", fault)
                return message.reject_log_error(log, self.connection_errors)
            return handle(message)

        return on_message
