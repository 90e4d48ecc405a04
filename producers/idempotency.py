"""Idempotency-Key: however often a request comes, its jobs are made once.

The key's record in the store names the request's first job; the ids of the others follow from that one. While a request
is being answered the key is in progress, for no longer than that may take; whoever comes meanwhile waits for it. A key
that was left behind by a crash names a job that may never have been made: then the next request makes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from brokers import calls, names
from brokers.errors import StoreUnavailable
from brokers.job import Job, State, id_age_s, new_job_id, nth_job_id
from brokers.keys import Principal
from producers.documents import header
from producers.platform import Platform
from producers.problems import Problem
from producers.submission import Draft, submit_all

log = logging.getLogger(__name__)

REPLAYED = {"Idempotency-Replayed": "true"}
ONCE = ("idempotency_in_progress", "idempotency_key_reused")
KEY = header(
    "Idempotency-Key",
    "1 to 255 printable ASCII characters. The same key and body again are answered with the same jobs, and "
    "`Idempotency-Replayed: true`, for as long as their records are kept.",
)

_PRINTABLE = re.compile(r"[\x20-\x7e]{1,255}\Z")
_IN_PROGRESS_MS = 2000  # a request is answered, or its process has died, by then
_WAIT_S = 2.2  # longer than that, so that a crash is outwaited
_POLL_S = 0.025
_YOUNG_S = 30.0  # records are kept longer: an id this young without one was never used up

_encoder = msgspec.json.Encoder(order="sorted")


class Once(NamedTuple):
    """A request's key as the store knows it."""

    tenant: str
    digest: str  # of tenant and key
    body: str  # digest of route and body


class Submitted(NamedTuple):
    """The jobs of a request."""

    jobs: list[Job]
    replayed: bool = False  # an earlier request made them


def once(request: Request, principal: Principal, body: msgspec.Struct) -> Once | None:
    """The request's key, if it has one. Raises Problem for one that is none.

    Bodies are compared as decoded: the order of fields and white space do not count."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not _PRINTABLE.match(key):
        raise Problem(
            "invalid_parameter", "Idempotency-Key: give 1 to 255 printable ASCII characters", param="Idempotency-Key"
        )
    content = request.scope["path"].encode() + b"\0" + _encoder.encode(body)
    return Once(principal.tenant, _digest(f"{principal.tenant}\0{key}".encode()), _digest(content))


async def submit_once(platform: Platform, key: Once | None, drafts: list[Draft]) -> Submitted:
    """The request's jobs: made now, or found. Raises Problem (409, 422), and Unavailable when they will never run."""
    if key is None:
        return Submitted(await submit_all(platform, drafts))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _WAIT_S
    while loop.time() < deadline:
        answer = await _try(platform, key, drafts)
        if answer:
            return answer
        await asyncio.sleep(_POLL_S)
    raise Problem(
        "idempotency_in_progress", "a request with this Idempotency-Key is in progress", headers={"Retry-After": "1"}
    )


async def _try(platform: Platform, key: Once, drafts: list[Draft]) -> Submitted | None:
    """None while another request is at it."""
    first_id = new_job_id(platform.settings.region)
    call = calls.idempotent(_name(platform, key), key.body, first_id, _IN_PROGRESS_MS, _keep_ms(platform, drafts))
    match await platform.store.call(call):
        case None:
            return await _make(platform, key, drafts, first_id)
        case calls.OtherBody():
            raise Problem("idempotency_key_reused", "this Idempotency-Key came with another request before")
        case calls.Known(job_id):
            return await _find(platform, key, drafts, job_id)
    return None


async def _find(platform: Platform, key: Once, drafts: list[Draft], first_id: str) -> Submitted | None:
    """The jobs that the key names. Those that are not there are made, if nobody else is at it."""
    found = await asyncio.gather(*(platform.store.get(nth_job_id(first_id, i)) for i in range(len(drafts))))
    jobs = [job for job in found if job]
    undone = any(job.state in {State.WITHDRAWN, State.ERASED} for job in jobs)
    if len(jobs) == len(drafts) and not undone:
        return Submitted(jobs, replayed=True)
    # The same ids again while they are young: should their first request live after all, it finds them taken.
    spoilt = undone or any(job.state is State.CANCELLED for job in jobs)
    again = not spoilt and id_age_s(first_id) < _YOUNG_S
    next_id = first_id if again else new_job_id(platform.settings.region)
    call = calls.unanswered(_name(platform, key), first_id, (next_id, _IN_PROGRESS_MS))
    return await _make(platform, key, drafts, next_id) if await platform.store.call(call) else None


async def _make(platform: Platform, key: Once, drafts: list[Draft], first_id: str) -> Submitted:
    free = calls.unanswered(_name(platform, key), first_id)
    try:
        jobs = await submit_all(platform, drafts, first_id)
    except StoreUnavailable:
        platform.later(_tell(platform, free))  # it would be waited for in vain, and the client is owed its 503
        raise
    except Exception:
        await _tell(platform, free)
        raise
    platform.later(_tell(platform, calls.answered(_name(platform, key), first_id)))
    return Submitted(jobs)


async def _tell(platform: Platform, call: calls.Call) -> None:
    try:
        await platform.store.call(call)
    except StoreUnavailable:
        log.warning("an Idempotency-Key stays in progress until its time is over")


def _name(platform: Platform, key: Once) -> str:
    settings = platform.settings
    return names.idempotency(settings.region, names.partition(key.digest, settings.partitions), key.tenant, key.digest)


def _keep_ms(platform: Platform, drafts: list[Draft]) -> int:
    """As long as the records of the jobs can be kept."""
    delay_ms = drafts[0].start_ms - int(time.time() * 1000) if drafts[0].start_ms else 0
    return max(0, delay_ms) + (drafts[0].expires_s + platform.settings.retention_s) * 1000


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
