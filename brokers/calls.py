"""The store's functions as values: what to send and how to read the reply, without any I/O.

The API sends these over asyncio and the worker over a blocking connection; both build and parse them here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from brokers import names
from brokers.job import Failure, FinishReason, Job, Kind, Lane, State, Usage
from brokers.settings import Settings

_LISTED_FOR_MS = 24 * 3600 * 1000


class Call(NamedTuple):
    """One command and the reader of its reply."""

    command: tuple[Any, ...]
    parse: Callable[[Any], Any]


class Claimed(NamedTuple):
    """The claimer owns the job now; `pos` content tokens are in the stream."""

    pos: int
    attempt: int
    sealed: bytes


class Busy(NamedTuple):
    """Another owner's lease is live for `left_ms` more."""

    left_ms: int
    worker: str


class Ended(NamedTuple):
    """The job is over; there is nothing to do."""

    state: State


class Stale(NamedTuple):
    """A message of an older publish generation: drop it."""


class Gone(NamedTuple):
    """The store has no such record."""


class Fenced(NamedTuple):
    """The token is no longer the owner's: whatever this process writes is refused from now on."""


class Rewind(NamedTuple):
    """The stream stands at `pos`, not where the caller thought."""

    pos: int


class Accepted(NamedTuple):
    """Written. `cancel`: the job is asked to stop."""

    cancel: bool = False


class Publish(NamedTuple):
    """The reconciler is to publish the job under this generation."""

    gen: int
    sealed: bytes


Written = Accepted | Fenced | Gone | Rewind
Claim = Claimed | Busy | Ended | Stale | Gone


class Keys(NamedTuple):
    """The Redis keys of one job; they share a slot."""

    record: str
    stream: str
    live: str
    by_tenant: str


def library() -> str:
    """Source of the function library."""
    return files("brokers").joinpath("functions.lua").read_text()


def keys(job: Job, partitions: int) -> Keys:
    part = names.partition(job.id, partitions)
    return Keys(
        names.record(job.home, part, job.id),
        names.stream(job.home, part, job.tenant, job.id),
        names.live(job.home, part),
        names.tenant_jobs(job.home, part, job.tenant),
    )


def create(job: Job, sealed: bytes, k: Keys, settings: Settings) -> Call:
    retention_ms = settings.retention_s * 1000
    fields = (
        *("id", job.id, "tenant", job.tenant, "kind", job.kind.value, "model", job.model, "lane", job.lane.value),
        *("home", job.home, "place", job.place, "gen", job.gen, "created", job.created_ms),
        *("deadline", job.deadline_ms, "prompt_tokens", job.prompt_tokens, "sealed", sealed),
        *("metadata", msgspec.json.encode(job.metadata)),
    )
    ttl_ms = job.deadline_ms - job.created_ms + retention_ms
    grace_ms = int(settings.accepted_grace_s * 1000)
    return Call(_fcall("create", k, job.id, retention_ms, grace_ms, max(ttl_ms, _LISTED_FOR_MS), *fields), _created)


def queued(job: Job, k: Keys, settings: Settings) -> Call:
    check_ms = int(settings.queued_check_s * 1000)
    return Call(_fcall("queued", (k.record, k.live), job.id, check_ms), _state)


def withdraw(job: Job, k: Keys) -> Call:
    return Call(_fcall("withdraw", k, job.id), bool)


def cancel(job: Job, k: Keys) -> Call:
    return Call(_fcall("cancel", k[:3], names.hints(job.home), job.id), _state)


def claim(job: Job, k: Keys, *, worker: str, token: str, lease_ms: int) -> Call:
    return Call(_fcall("claim", k[:3], job.id, job.gen, worker, token, lease_ms), _claim)


def renew(k: Keys, token: str, lease_ms: int) -> Call:
    return Call(_fcall("renew", k[:1], token, lease_ms), written)


def append(k: Keys, token: str, lease_ms: int, start: int, pos: int, fields: tuple[str | bytes, ...]) -> Call:
    """`fields` are text, ids, offsets and digest, as brokers.entries packs them."""
    return Call(_fcall("append", k[:2], token, lease_ms, start, pos, *fields), written)


def finish(
    k: Keys, token: str, pos: int, state: State, reason: FinishReason, prompt_tokens: int, failure: Failure | None
) -> Call:
    why = (failure.code, failure.message) if failure else ()
    return Call(_fcall("finish", k[:3], token, pos, state.value, reason.value, prompt_tokens, *why), written)


def release(job: Job, k: Keys, token: str, settings: Settings) -> Call:
    check_ms = int(settings.queued_check_s * 1000)
    return Call(_fcall("release", (k.record, k.live), job.id, token, check_ms), written)


def reconcile(job_id: str, k: Keys, settings: Settings, *, assume_lost: bool) -> Call:
    grace_ms, check_ms = int(settings.accepted_grace_s * 1000), int(settings.queued_check_s * 1000)
    return Call(_fcall("reconcile", k[:3], job_id, grace_ms, check_ms, int(assume_lost)), _reconciled)


_FIELDS = (
    *("id", "tenant", "kind", "model", "lane", "home", "place", "state", "gen", "attempt", "created", "deadline"),
    *("pos", "prompt_tokens", "started", "ended", "worker", "finish", "usage_prompt", "usage_completion"),
    *("error_code", "error_message", "metadata"),
)


def fetch(record: str) -> Call:
    """The record without what is sealed."""
    return Call(("HMGET", record, *_FIELDS), _job)


def entries_of(k: Keys) -> Call:
    """All entries of a stream, each with its fields."""
    return Call(("XRANGE", k.stream, "-", "+"), lambda reply: reply)


def _fcall(verb: str, k: tuple[str, ...], *args: Any) -> tuple[Any, ...]:
    return ("FCALL", names.function(verb), len(k), *k, *args)


def _created(reply: Any) -> None:
    if isinstance(reply, list):
        raise RuntimeError("a job with this id exists already")  # 80 random bits met: a broken random source


def _state(reply: Any) -> State | None:
    return None if isinstance(reply, list) else State(reply.decode())


def written(reply: Any) -> Written:
    if isinstance(reply, int):
        return Accepted(cancel=bool(reply & 1))
    word = reply[0]
    if word == b"POS":
        return Rewind(reply[1])
    return Gone() if word == b"GONE" else Fenced()


def _claim(reply: list[Any]) -> Claim:
    match reply[0]:
        case b"OK":
            return Claimed(*reply[1:])
        case b"BUSY":
            return Busy(reply[1], reply[2].decode())
        case b"ENDED":
            return Ended(State(reply[1].decode()))
        case b"STALE":
            return Stale()
        case _:
            return Gone()


def _reconciled(reply: Any) -> Publish | Ended | None:
    if isinstance(reply, int):
        return None
    return Publish(reply[1], reply[2]) if reply[0] == b"PUBLISH" else Ended(State(reply[1].decode()))


def _job(reply: list[bytes | None]) -> Job | None:
    values = {name: value.decode() for name, value in zip(_FIELDS, reply, strict=True) if value is not None}
    if "id" not in values:
        return None
    number = {name: int(value) for name, value in values.items() if value.isdecimal()}
    return Job(
        id=values["id"],
        tenant=values["tenant"],
        kind=Kind(values["kind"]),
        model=values["model"],
        lane=Lane(values["lane"]),
        home=values["home"],
        place=values["place"],
        state=State(values["state"]),
        gen=number["gen"],
        attempt=number["attempt"],
        created_ms=number["created"],
        deadline_ms=number["deadline"],
        pos=number["pos"],
        prompt_tokens=number["prompt_tokens"],
        started_ms=number.get("started"),
        ended_ms=number.get("ended"),
        worker=values.get("worker"),
        finish_reason=FinishReason(values["finish"]) if "finish" in values else None,
        usage=Usage(number["usage_prompt"], number["usage_completion"]) if "usage_prompt" in values else None,
        failure=Failure(values["error_code"], values["error_message"]) if "error_code" in values else None,
        metadata=msgspec.json.decode(values.get("metadata", "{}"), type=dict[str, str]),
    )
