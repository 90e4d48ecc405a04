"""The task bodies: a message in, a job run, what Celery and Flower are told of it."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

from celery import Task, shared_task
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

from brokers import envelope, names
from brokers.job import Kind, State
from workers import runtime
from workers.runner import HandedBackError, JobFailedError, PoisonError, Runner

_DURABLE_S = 2.0
"""A store that syncs its append-only file each second has a record safe by then."""


class JobRequest(Request):
    """A delivered message, and the two things about it that Celery cannot know.

    A revoke may meet it before it runs: Celery drops it then, so its job must end too. And while its record is so
    young that the store may still lose it, the message is the only copy of the job: it is acknowledged after that. A
    job that ran, or waited, for two seconds is acknowledged at once, so a worker under load waits for nothing.
    """

    def acknowledge(self) -> None:
        worker = runtime.current()
        age_s = time.time() - self.kwargs.get("created_ms", 0) / 1000
        if worker and 0 <= age_s < _DURABLE_S and not self.acknowledged:
            worker.later.call(_DURABLE_S - age_s, super().acknowledge)
        else:
            super().acknowledge()

    def revoked(self) -> bool:
        revoked: bool = super().revoked()
        worker = runtime.current()
        if revoked and worker:
            worker.ask_cancel(envelope.unpack(self.kwargs).to_job())
        return revoked


def generate(self: Task, **kwargs: Any) -> str:
    """Run a job of any kind. The result is a word for Flower; what was generated is in the stream."""
    worker = runtime.current()
    if worker is None:
        raise Reject("this process has no engine", requeue=True)
    message = envelope.unpack(kwargs)
    try:
        state = Runner(worker).run(message)
    except HandedBackError:
        raise Reject("handed back", requeue=True) from None
    except PoisonError:
        raise Reject("poison", requeue=False) from None  # to the dead-letter queue
    if state == State.CANCELLED:
        self.send_event("task-revoked", terminated=True, signum=None, expired=False)
        raise Ignore
    if state == State.EXPIRED:
        self.send_event("task-revoked", terminated=True, signum=None, expired=True)
        raise Ignore
    return state


for _kind, _version in product((Kind.TEXT, Kind.EMBEDDING), names.ACCEPTED):
    shared_task(name=names.task(_kind, _version), bind=True, throws=(JobFailedError,), Request=JobRequest)(generate)
