"""The task bodies: a message in, a job run, what Celery and Flower are told of it."""

from __future__ import annotations

from typing import Any

from celery import Task, shared_task
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

from brokers import envelope, names
from brokers.job import Kind, State
from workers import runtime
from workers.runner import HandedBackError, JobFailedError, PoisonError, Runner


class JobRequest(Request):
    """A delivered message, which a revoke may meet before it runs: Celery drops it then, so its job must end too."""

    def revoked(self) -> bool:
        revoked: bool = super().revoked()
        worker = runtime.current()
        if revoked and worker:
            worker.ask_cancel(envelope.unpack(self.kwargs).to_job())
        return revoked


@shared_task(name=names.task(Kind.TEXT), bind=True, throws=(JobFailedError,), Request=JobRequest)
def generate_text(self: Task, **kwargs: Any) -> str:
    """Generate a job's text. The result is a word for Flower; what was generated is in the stream."""
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
