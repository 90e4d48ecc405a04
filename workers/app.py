"""The Celery app. `celery -A workers.app worker -Q <queues>` is a whole worker; `lingbot worker` only picks the queues.

Read workers/tasks.py for what a message does, workers/engines.py for where it is generated.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, signals
from celery.exceptions import Reject
from kombu.entity import Exchange, Queue

from brokers import logs, names, topology
from brokers.job import Lane
from brokers.models import Registry
from brokers.settings import Settings, load


def queues(settings: Settings) -> list[Queue]:
    """Every lane queue of this region, with the arguments that topology declares."""
    models = [model.card.name for model in Registry(settings.models_dir).all()]
    exchange = Exchange(names.EXCHANGE, "direct", durable=True)
    lanes = [spec for spec in topology.queues(settings, settings.region, models) if spec.exchange == names.EXCHANGE]
    return [Queue(q.name, exchange, q.routing_key, queue_arguments=q.arguments, durable=True) for q in lanes]


def configuration(settings: Settings) -> dict[str, Any]:
    return {
        "broker_url": settings.here.amqp.get_secret_value(),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # for ever
        "broker_channel_error_retry": True,
        "broker_heartbeat": 10,
        "task_queues": queues(settings),
        # A queue that is not in the topology would be made as a classic one; a typo in -Q stops the start instead.
        "task_create_missing_queues": False,
        "task_default_exchange": names.EXCHANGE,
        "task_default_queue": "none",
        "task_ignore_result": True,
        "result_backend": None,
        "accept_content": ["json"],
        "task_serializer": "json",
        "task_acks_late": True,
        "task_acks_on_failure_or_timeout": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_cancel_long_running_tasks_on_connection_loss": False,  # a redelivery is adopted, see runner.py
        "worker_pool": "workers.pool:EnginePool",
        "worker_concurrency": sum(settings.prefetch(lane) for lane in Lane),
        "worker_consumer": "workers.consumer:Consumer",
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_enable_remote_control": True,
    }


def create_app(settings: Settings) -> Celery:
    from workers.lifecycle import EngineStep

    celery = Celery("lingbot", amqp="workers.consumer:LaneAMQP", include=["workers.tasks"])
    celery.conf.update(configuration(settings))
    celery.steps["worker"].add(EngineStep)
    return celery


@signals.setup_logging.connect
def _configure_logging(loglevel: int, **_: Any) -> None:
    """Instead of Celery's own: our lines, at the level that was asked of Celery."""
    logs.configure(load())
    logging.getLogger().setLevel(loglevel)
    logging.getLogger("celery.app.trace").addFilter(_without_trace_of_reject)


def _without_trace_of_reject(record: logging.LogRecord) -> bool:
    """A hand-back is no fault, though Celery logs it as one."""
    if record.exc_info and isinstance(record.exc_info[1], Reject):
        record.exc_info = None
    return True


app = create_app(load())
