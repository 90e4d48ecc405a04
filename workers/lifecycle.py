"""Start and drain of a worker: engines are loaded before the first message, and jobs end before the process does.

Celery's warm shutdown stops its event loop first, so heartbeats starve and the broker delivers the running jobs
again. Here SIGTERM stops the consuming and leaves the loop running; when the last job has ended, or at the drain
deadline been handed back, Celery's own shutdown finds nothing left to do.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

from celery import bootsteps
from celery.worker import state

from brokers import names, topology
from brokers.errors import BrokerUnavailable, LingbotError
from brokers.job import Lane
from brokers.models import Registry
from brokers.settings import Settings, load
from workers import node_name, runtime
from workers.heartbeat import Heartbeat

log = logging.getLogger(__name__)

_LEAVE_S = 2.0
_HAND_BACK_S = 10.0  # at most, for engines to let go and the store to hear of it


class EngineStep(bootsteps.StartStopStep):
    """Owns the Runtime of this worker."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._worker = worker
        self._runtime: runtime.Runtime | None = None
        self._heartbeat: Heartbeat | None = None
        self._drain: threading.Thread | None = None

    def start(self, worker: Any) -> None:
        try:
            self._start(worker)
        except LingbotError as error:  # for an operator to mend: a trace would only hide it
            log.critical("%s. %s", error.message, error.advice)
            raise SystemExit(1) from None

    def _start(self, worker: Any) -> None:
        settings = load()
        node_name.require_free(worker.app, worker.hostname)
        consumed = set(worker.app.amqp.queues.consume_from)
        # A thread for each message that may be here: several models' messages must not wait for each other.
        prefetched = sum(settings.prefetch(lane) for lane in map(names.lane_of, consumed) if lane)
        worker.pool.grow(max(0, prefetched - worker.pool.limit))
        models = served_models(settings, consumed)
        _declare(settings, models)
        self._runtime = runtime.Runtime(settings, worker.hostname, models, self._on_service)
        self._runtime.start()
        runtime.install(self._runtime)
        self._heartbeat = Heartbeat(self._runtime, os.getpid())
        self._heartbeat.start()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def stop(self, worker: Any) -> None:
        if self._runtime is None:
            return
        self._runtime.draining.set()
        if self._heartbeat:
            self._heartbeat.stop()
        self._runtime.stop()
        runtime.install(None)

    terminate = stop

    def _on_signal(self, *_: Any) -> None:
        if self._runtime is None:
            return
        if self._drain is not None:  # asked twice: do not wait for jobs
            self._runtime.hand_back_all()
            return
        self._drain = threading.Thread(target=self._drain_and_stop, args=(self._runtime,), name="drain", daemon=True)
        # The consumer belongs to the event loop's thread, which this handler interrupts.
        self._worker.consumer.hub.call_soon(self._stop_consuming)
        self._drain.start()

    def _on_service(self, model: str, in_service: bool) -> None:
        """An engine that does not start takes its model out of this worker, until it does."""
        consumer, region = self._worker.consumer, load().region
        act = consumer.add_task_queue if in_service else consumer.cancel_task_queue
        log.error("model %s is %s here", model, "in service again" if in_service else "out of service")
        for lane in Lane:
            consumer.hub.call_soon(act, names.queue(region, model, lane))

    def _stop_consuming(self) -> None:
        consumer = self._worker.consumer
        log.warning("draining: no new jobs; %d are running", self._runtime.running() if self._runtime else 0)
        if consumer.task_consumer:
            consumer.task_consumer.cancel()

    def _drain_and_stop(self, running: runtime.Runtime) -> None:
        running.draining.set()
        _until_idle(running.settings.drain_s)
        running.hand_back_all()
        _until_idle(_HAND_BACK_S)
        running.leaving.set()  # the store is away: their messages go back, and their leases run out
        _until_idle(_LEAVE_S)
        running.later.flush()
        state.should_stop = 0


def _declare(settings: Settings, models: list[str]) -> None:
    """Before engines load, which takes long. Raises ConfigurationError when a queue exists with other arguments."""
    try:
        topology.declare(settings, models)
    except BrokerUnavailable as error:  # the consumer waits for it, and declares its queues then
        log.warning("the queues are not checked: %s", error.message)


def served_models(settings: Settings, queues: set[str]) -> list[str]:
    """The models whose queues of this region a worker consumes."""
    models = [model.card.name for model in Registry(settings.models_dir).all()]
    return [m for m in models if any(names.queue(settings.region, m, lane) in queues for lane in Lane)]


def _until_idle(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (state.reserved_requests or state.active_requests) and time.monotonic() < deadline:
        time.sleep(0.05)
