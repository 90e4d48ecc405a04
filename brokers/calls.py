"""The store's functions as values: what to send and how to read the reply, without any I/O.

The API sends these over asyncio and the worker over a blocking connection; both build and parse them here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from brokers import entries, names
from brokers.job import Failure, FinishReason, Job, Kind, Lane, State, Usage
from brokers.settings import Settings

_LISTED_FOR_MS = 24 * 3600 * 1000


class Call(NamedTuple):
    """One command and the reader of its reply."""

    command: tuple[Any, ...]
    parse: Callable[[Any], Any]


class Claimed(NamedTuple):
    """The claimer owns the job now; `pos` content tokens are in the stream. One more death over a `suspect` job, and it
    is given up."""

    pos: int
    attempt: int
    sealed: bytes
    suspect: bool = False


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


class Unowned(NamedTuple):
    """The job waits for an owner: it was handed back, or the store has forgotten the claim."""


class Rewind(NamedTuple):
    """The stream stands at `pos`, not where the caller thought."""

    pos: int


class Accepted(NamedTuple):
    """Written. `cancel`: the job is asked to stop."""

    cancel: bool = False


class Poison(NamedTuple):
    """Workers died over this job too often: it has failed, and its message belongs into the dead-letter queue."""


class Settle(NamedTuple):
    """An ended job whose usage is not on its tenant's account yet."""

    tenant: str
    state: State
    prompt_tokens: int
    completion_tokens: int
    ended_ms: int


class InProgress(NamedTuple):
    """Another request with this Idempotency-Key is at it for `left_ms` more at most."""

    left_ms: int


class OtherBody(NamedTuple):
    """This Idempotency-Key came with another body before."""


class Known(NamedTuple):
    """This Idempotency-Key belongs to this job, if that was ever made."""

    job_id: str


class Publish(NamedTuple):
    """The reconciler is to publish the job under this generation."""

    gen: int
    sealed: bytes


Written = Accepted | Fenced | Unowned | Gone | Rewind
Claim = Claimed | Busy | Ended | Stale | Gone | Poison
Reconciled = Publish | Ended | Settle | None
Idempotent = InProgress | OtherBody | Known | None


class Keys(NamedTuple):
    """The Redis keys of one job; they share a slot."""

    record: str
    stream: str
    live: str
    webhooks: str
    by_tenant: str


def library() -> str:
    """Source of the function library, under the names of this version."""
    source = files("brokers").joinpath("functions.lua").read_text()
    return source.replace("name=lingbot1", f"name={names.FUNCTION_LIBRARY}").replace("'lb1_", f"'{names.function('')}")


def keys(job: Job, partitions: int) -> Keys:
    part = names.partition(job.id, partitions)
    return Keys(
        names.record(job.home, part, job.id),
        names.stream(job.home, part, job.tenant, job.id),
        names.live(job.home, part),
        names.webhooks(job.home, part),
        names.tenant_jobs(job.home, part, job.tenant),
    )


def create(job: Job, sealed: bytes, k: Keys, settings: Settings) -> Call:
    retention_ms = settings.retention_s * 1000
    fields = (
        *("id", job.id, "tenant", job.tenant, "kind", job.kind.value, "model", job.model, "lane", job.lane.value),
        *("home", job.home, "place", job.place, "gen", job.gen, "created", job.created_ms),
        *("deadline", job.deadline_ms, "prompt_tokens", job.prompt_tokens, "sealed", sealed),
        *("metadata", msgspec.json.encode(job.metadata)),
        *(("start", job.start_ms) if job.start_ms else ()),
        *(("webhook", job.webhook) if job.webhook else ()),
    )
    times = (retention_ms, _first_look_ms(job, settings), _kept_ms(job, settings), _listed_ms(settings))
    return Call(_fcall("create", k, job.id, *times, *fields), _created)


def _first_look_ms(job: Job, settings: Settings) -> int:
    if job.start_ms is None:
        return int(settings.accepted_grace_s * 1000)
    return max(0, job.start_ms - job.created_ms)


def _kept_ms(job: Job, settings: Settings) -> int:
    return max(job.deadline_ms - job.created_ms + settings.retention_s * 1000, _LISTED_FOR_MS)


def _listed_ms(settings: Settings) -> int:
    """No record lives longer past its job's start."""
    return max((settings.max_expires_s + settings.retention_s) * 1000, _LISTED_FOR_MS)


def queued(job: Job, k: Keys, settings: Settings) -> Call:
    check_ms = int(settings.queued_check_s * 1000)
    return Call(_fcall("queued", (k.record, k.live), job.id, check_ms), _state)


def withdraw(job: Job, k: Keys) -> Call:
    return Call(_fcall("withdraw", k, job.id, job.created_ms), bool)


def cancel(job: Job, k: Keys) -> Call:
    return Call(_fcall("cancel", k[:4], names.hints(job.home), job.id), _state)


def claim(job: Job, k: Keys, *, worker: str, token: str, lease_ms: int) -> Call:
    return Call(_fcall("claim", k[:4], job.id, job.gen, worker, token, lease_ms), _claim)


def renew(k: Keys, token: str, lease_ms: int) -> Call:
    return Call(_fcall("renew", k[:1], token, lease_ms), written)


def append(k: Keys, token: str, lease_ms: int, start: int, pos: int, fields: tuple[str | bytes, ...]) -> Call:
    """`fields` are the digest and the fields of the entry, as brokers.entries packs them."""
    return Call(_fcall("append", k[:2], token, lease_ms, start, pos, *fields), written)


def finish(
    k: Keys, token: str, pos: int, state: State, reason: FinishReason, prompt_tokens: int, failure: Failure | None
) -> Call:
    why = (failure.code, failure.message) if failure else ()
    return Call(_fcall("finish", k[:4], token, pos, state.value, reason.value, prompt_tokens, *why), written)


def look(job: Job, k: Keys) -> Call:
    """Whether the store still knows of the end of a job: Accepted, or Gone. What it half forgot is published again."""
    return Call(_fcall("look", (k.record, k.live), job.id), written)


def release(job: Job, k: Keys, token: str, settings: Settings) -> Call:
    check_ms = int(settings.queued_check_s * 1000)
    return Call(_fcall("release", (k.record, k.live), job.id, token, check_ms), written)


def begin(k: Keys, token: str) -> Call:
    return Call(_fcall("begin", k[:1], token), written)


def struck(k: Keys, token: str) -> Call:
    """The engine died over this job alone. Accepted, or Poison when that was enough."""
    return Call(_fcall("struck", k[:4], token), _struck)


def account(job_id: str, region: str, settle: Settle, keep_ms: int) -> Call:
    """True when it was counted now, False when it had been before."""
    day = datetime.fromtimestamp(settle.ended_ms / 1000, UTC).strftime("%Y-%m-%d")
    k = (names.usage(region, settle.tenant, day), names.settled(region, settle.tenant))
    tokens = (settle.prompt_tokens, settle.completion_tokens)
    return Call(_fcall("account", k, job_id, settle.state.value, *tokens, keep_ms), bool)


def settled(job_id: str, k: Keys) -> Call:
    return Call(_fcall("settled", (k.record, k.live), job_id), bool)


def erase(job: Job, k: Keys, settings: Settings) -> Call:
    return Call(_fcall("erase", k, job.id, settings.retention_s * 1000), _state)


def idempotent(key: str, body: str, job_id: str, until_ms: int, keep_ms: int) -> Call:
    """None when the key is new: the caller makes the job of that id."""
    return Call(_fcall("idempotent", (key,), body, job_id, until_ms, keep_ms), _idempotent)


def answered(key: str, job_id: str) -> Call:
    return Call(_fcall("answered", (key,), job_id), bool)


def unanswered(key: str, job_id: str, next_try: tuple[str, int] = ("", 0)) -> Call:
    """Forget the key, or give it to the next try (its job id, and how long it may take in ms). False: no longer its."""
    more = next_try if next_try[0] else ()
    return Call(_fcall("unanswered", (key,), job_id, *more), bool)


def told_due(webhooks: str, limit: int, lease_ms: int) -> Call:
    """Ids of jobs whose end is to be told now; nobody else gets them before the lease is over."""
    return Call(_fcall("told_due", (webhooks,), limit, lease_ms), _ids)


def told(job: Job, k: Keys, dead: str, error: str, retry_ms: int | None) -> Call:
    """What came of a try: no `error`, or the next one in `retry_ms`, or with None no more of them."""
    then: int | str = "" if not error else -1 if retry_ms is None else retry_ms
    return Call(_fcall("told", (k.record, k.webhooks, dead), job.id, error, then), bool)


def tell_again(job: Job, k: Keys, dead: str) -> Call:
    """False when its webhook was not given up."""
    return Call(_fcall("tell_again", (k.record, k.webhooks, dead), job.id), bool)


def webhook_tries(record: str) -> Call:
    """How often it was tried, and what came of the last one."""
    return Call(("HMGET", record, "told", "told_error"), _tries)


def due(live: str, limit: int) -> Call:
    """Ids of jobs that the reconciler is to look at now."""
    return Call(_fcall("due", (live,), limit), _ids)


def reconcile(job_id: str, k: Keys, settings: Settings, *, assume_lost: bool, can_publish: bool = True) -> Call:
    grace_ms, check_ms = int(settings.accepted_grace_s * 1000), int(settings.queued_check_s * 1000)
    seen = int(assume_lost), int(can_publish)
    return Call(_fcall("reconcile", k[:4], job_id, grace_ms, check_ms, *seen), _reconciled)


_FIELDS = (
    *("id", "tenant", "kind", "model", "lane", "home", "place", "state", "gen", "attempt", "created", "deadline"),
    *("pos", "prompt_tokens", "started", "ended", "worker", "finish", "usage_prompt", "usage_completion"),
    *("error_code", "error_message", "metadata", "start", "webhook"),
)
_BYTES = frozenset({"webhook"})
_NUMBERS = (
    *("gen", "attempt", "created", "deadline", "pos", "prompt_tokens", "started", "ended", "usage_prompt"),
    *("usage_completion", "start"),
)


def fetch(record: str) -> Call:
    """The record without what is sealed."""
    return Call(("HMGET", record, *_FIELDS), _job)


def entries_of(k: Keys) -> Call:
    """All entries of a stream, each with its fields."""
    return Call(("XRANGE", k.stream, "-", "+"), entries.rows)


def _fcall(verb: str, k: tuple[str, ...], *args: Any) -> tuple[Any, ...]:
    return ("FCALL", names.function(verb), len(k), *k, *args)


def _ids(reply: list[bytes]) -> list[str]:
    return [job_id.decode() for job_id in reply]


def _created(reply: Any) -> bool:
    """False when there is such a record already."""
    return not isinstance(reply, list)


def _state(reply: Any) -> State | None:
    return None if isinstance(reply, list) else State(reply.decode())


def written(reply: Any) -> Written:
    if isinstance(reply, int):
        return Accepted(cancel=bool(reply & 1))
    word = reply[0]
    if word == b"POS":
        return Rewind(reply[1])
    if word == b"UNOWNED":
        return Unowned()
    return Gone() if word == b"GONE" else Fenced()


def _claim(reply: list[Any]) -> Claim:
    match reply[0]:
        case b"OK":
            _, pos, attempt, sealed, suspect = reply
            return Claimed(pos, attempt, sealed, bool(suspect))
        case b"BUSY":
            return Busy(reply[1], reply[2].decode())
        case b"ENDED":
            return Ended(State(reply[1].decode()))
        case b"STALE":
            return Stale()
        case b"POISON":
            return Poison()
        case _:
            return Gone()


def _struck(reply: Any) -> Written | Poison:
    return Poison() if isinstance(reply, list) and reply[0] == b"POISON" else written(reply)


def _reconciled(reply: Any) -> Reconciled:
    if isinstance(reply, int):
        return None
    match reply[0]:
        case b"PUBLISH":
            return Publish(reply[1], reply[2])
        case b"SETTLE":
            tenant, state, *numbers = (part.decode() for part in reply[1:])
            return Settle(tenant, State(state), *map(int, numbers))
        case _:
            return Ended(State(reply[1].decode()))


def _idempotent(reply: Any) -> Idempotent:
    if isinstance(reply, int):
        return None
    match reply[0]:
        case b"OTHER":
            return OtherBody()
        case b"WAIT":
            return InProgress(reply[1])
        case _:
            return Known(reply[1].decode())


def _tries(reply: list[bytes | None]) -> tuple[int, str]:
    return int(reply[0] or 0), (reply[1] or b"").decode()


def _job(reply: list[bytes | None]) -> Job | None:
    found = dict(zip(_FIELDS, reply, strict=True))
    values = {name: value.decode() for name, value in found.items() if value is not None and name not in _BYTES}
    if "id" not in values:
        return None
    number = {name: int(values[name]) for name in _NUMBERS if name in values}
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
        failure=Failure(values["error_code"], values.get("error_message", "")) if "error_code" in values else None,
        metadata=msgspec.json.decode(values.get("metadata", "{}"), type=dict[str, str]),
        start_ms=number.get("start"),
        webhook=found["webhook"],
    )
