"""The only file that knows Celery's message format (task protocol 2).

Built by hand, because `apply_async` costs a serializer, a producer pool and a blocking confirm per call, and because
this way the API needs no Celery. Prompts are inside `sealed` only; `argsrepr` and `kwargsrepr`, which Celery's events
and Flower show, name the job and nothing more.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
from pika import BasicProperties

from brokers import names
from brokers.job import Job, Kind, Lane, State

_PERSISTENT = 2
_BODY = tuple[list[Any], dict[str, Any], dict[str, Any]]  # args, kwargs, what Celery's canvas adds
_TASKS = frozenset(names.task(kind, version) for kind in Kind for version in names.ACCEPTED)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A job's message: enough to run it, and to rebuild its record should the store have lost it."""

    job: str
    tenant: str
    kind: Kind
    model: str
    lane: Lane
    home: str
    place: str
    gen: int
    created_ms: int
    deadline_ms: int
    prompt_tokens: int
    sealed: str  # base64
    webhook: str | None = None  # base64, sealed
    trace: str | None = None  # W3C traceparent

    def to_job(self) -> Job:
        """The job as its message tells it; the store's record knows more."""
        return Job(
            id=self.job,
            tenant=self.tenant,
            kind=self.kind,
            model=self.model,
            lane=self.lane,
            home=self.home,
            place=self.place,
            state=State.QUEUED,
            gen=self.gen,
            created_ms=self.created_ms,
            deadline_ms=self.deadline_ms,
            prompt_tokens=self.prompt_tokens,
            webhook=base64.b64decode(self.webhook) if self.webhook else None,
        )

    def sealed_spec(self) -> bytes:
        return base64.b64decode(self.sealed)


def pack(job: Job, sealed: bytes, trace: str | None = None) -> Envelope:
    return Envelope(
        job=job.id,
        tenant=job.tenant,
        kind=job.kind,
        model=job.model,
        lane=job.lane,
        home=job.home,
        place=job.place,
        gen=job.gen,
        created_ms=job.created_ms,
        deadline_ms=job.deadline_ms,
        prompt_tokens=job.prompt_tokens,
        sealed=base64.b64encode(sealed).decode(),
        webhook=base64.b64encode(job.webhook).decode() if job.webhook else None,
        trace=trace,
    )


def unpack(kwargs: dict[str, Any]) -> Envelope:
    """The keyword arguments of a task, checked. Raises msgspec.ValidationError."""
    return msgspec.convert(kwargs, Envelope)


def decode(body: bytes | str) -> Envelope:
    """The envelope in a message's body. Raises msgspec.MsgspecError."""
    _, kwargs, _ = msgspec.json.decode(body, type=_BODY)
    return unpack(kwargs)


def fault(headers: Mapping[str, Any] | None, body: bytes | str) -> str | None:
    """Why a message is no job's; None when it is one, or of a task unknown here."""
    headers = headers or {}
    task = headers.get("task")
    if not isinstance(task, str):
        return "it names no task"
    if task not in _TASKS:
        return None
    try:
        found = decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return str(error)
    if headers.get("id") != found.job:
        return "its id is not its job's"
    if any(headers.get(name) is not None for name in ("eta", "expires")):
        return "it is to run at a time of Celery's"
    return None


def encode(envelope: Envelope) -> tuple[BasicProperties, bytes]:
    """Properties and body of the AMQP message. The task id is the job id, so Flower finds a job by its own name."""
    # What protocol 2 needs and no more: each header costs a microsecond to encode, and what is absent is None.
    headers: dict[str, Any] = {
        "lang": "py",
        "task": names.task(envelope.kind),
        "id": envelope.job,
        "root_id": envelope.job,
        "argsrepr": "()",
        "kwargsrepr": f"{{'job': '{envelope.job}', 'gen': {envelope.gen}}}",
        "ignore_result": True,
    }
    properties = BasicProperties(
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers,
        delivery_mode=_PERSISTENT,
        correlation_id=envelope.job,
        message_id=envelope.job,
    )
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    return properties, msgspec.json.encode([[], envelope, embed])
