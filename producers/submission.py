"""From a checked request to a job the broker has confirmed.

    draft -> job and sealed spec -> record (accepted) -> confirmed publish -> queued -> the client's 202

A job that starts later stays `accepted`, and the reconciler publishes it when it is due.

When the broker does not confirm, the record is withdrawn before the client hears 503; when it can no longer be (a
worker has it already), or nobody can tell, the job exists and the client gets its 202.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

import msgspec

from brokers.errors import BrokerUnavailable, StoreUnavailable, Unavailable
from brokers.job import Job, Lane, Spec, State, Webhook, new_job_id, nth_job_id
from producers.platform import Platform

log = logging.getLogger(__name__)

_ANSWER_S = 1.4  # a client is owed 503 within 1.5 s
_WITHDRAW_EACH_S = 0.5

_random = random.SystemRandom()


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passed every check, before anything is stored."""

    tenant: str
    model: str
    lane: Lane
    spec: Spec
    expires_s: int
    metadata: dict[str, str] = {}
    start_ms: int | None = None  # `expires_s` counts from then
    webhook: Webhook | None = None


def new_seed() -> int:
    """53 bits: every JSON reader keeps them whole."""
    return _random.getrandbits(53)


async def submit(platform: Platform, draft: Draft, job_id: str | None = None) -> Job:
    """The job, confirmed by the broker. Raises Unavailable when it will never run.

    A job that exists already under `job_id` is left as it is, and returned."""
    deadline = asyncio.get_running_loop().time() + _ANSWER_S
    job = _job(platform, draft, job_id or new_job_id(platform.settings.region))
    sealed = platform.sealer.seal(job, draft.spec)
    try:
        if not await platform.store.create(job, sealed):
            return await platform.store.get(job.id) or job
    except StoreUnavailable:
        # It may have been written all the same: then it must not run behind the back of a client told 503.
        platform.later(_withdraw_later(platform, job))
        _count(platform, job, "unrecorded")
        raise
    if job.start_ms is not None:
        _count(platform, job, "scheduled")
        return job
    try:
        await _publish(platform, job, sealed, deadline)
    except Unavailable as error:
        return await _withdraw(platform, job, error)
    return await _queued(platform, job)


async def submit_all(platform: Platform, drafts: list[Draft], first_id: str | None = None) -> list[Job]:
    """All of them or none: when one fails the others are cancelled, and its error raised."""
    first_id = first_id or new_job_id(platform.settings.region)
    if len(drafts) == 1:
        return [await submit(platform, drafts[0], first_id)]
    submissions = (submit(platform, draft, nth_job_id(first_id, index)) for index, draft in enumerate(drafts))
    outcomes = await asyncio.gather(*submissions, return_exceptions=True)
    jobs = [outcome for outcome in outcomes if isinstance(outcome, Job)]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if failure:
        platform.later(cancel_all(platform, jobs))
        raise failure
    return jobs


async def cancel_all(platform: Platform, jobs: list[Job]) -> None:
    """Cancel what nobody waits for any more. What cannot be reached runs to its end, which is bounded."""
    for outcome in await asyncio.gather(*map(platform.store.cancel, jobs), return_exceptions=True):
        if isinstance(outcome, BaseException):
            log.warning("a job nobody waits for was not cancelled: %s", type(outcome).__name__)


def _job(platform: Platform, draft: Draft, job_id: str) -> Job:
    region = platform.settings.region
    now_ms = int(time.time() * 1000)
    job = Job(
        id=job_id,
        tenant=draft.tenant,
        kind=draft.spec.kind,
        model=draft.model,
        lane=draft.lane,
        home=region,
        place=region,
        state=State.ACCEPTED,
        created_ms=now_ms,
        deadline_ms=(draft.start_ms or now_ms) + draft.expires_s * 1000,
        start_ms=draft.start_ms,
        prompt_tokens=draft.spec.prompt_tokens,
        metadata=draft.metadata,
    )
    if draft.webhook is None:
        return job
    return msgspec.structs.replace(job, webhook=platform.sealer.seal_webhook(job, draft.webhook))


async def _publish(platform: Platform, job: Job, sealed: bytes, deadline: float) -> None:
    left_s = deadline - asyncio.get_running_loop().time()
    if left_s >= platform.settings.publish_timeout_s:
        await platform.publisher.publish(job, sealed)  # its own deadline is the nearer one
        return
    try:
        async with asyncio.timeout_at(deadline):
            await platform.publisher.publish(job, sealed)
    except TimeoutError:
        raise BrokerUnavailable from None


async def _withdraw(platform: Platform, job: Job, error: Unavailable) -> Job:
    try:
        withdrawn = await platform.store.withdraw(job)
    except StoreUnavailable:
        withdrawn = False  # unknown: the reconciler will publish it
    if withdrawn:
        _count(platform, job, "withdrawn")
        raise error
    _count(platform, job, "unconfirmed")
    return job


async def _queued(platform: Platform, job: Job) -> Job:
    _count(platform, job, "queued")
    try:
        state = await platform.store.queued(job)
    except StoreUnavailable:
        return job  # the broker has it; the record follows when it is claimed
    return msgspec.structs.replace(job, state=state or State.QUEUED)


async def _withdraw_later(platform: Platform, job: Job) -> None:
    until = time.monotonic() + platform.settings.accepted_grace_s  # then the reconciler publishes it
    while time.monotonic() < until:
        try:
            await platform.store.withdraw(job)
        except StoreUnavailable:
            await asyncio.sleep(_WITHDRAW_EACH_S)
        else:
            return


def _count(platform: Platform, job: Job, outcome: str) -> None:
    platform.metrics.submitted(job.lane.value, outcome, job.prompt_tokens)
