"""Dead letters: jobs that workers gave up on. List, show, replay as new jobs, drop. For whoever runs the platform."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from brokers.dead import DeadLetter, DeadLetters, Held
from brokers.errors import JobNotFound
from brokers.job import Job
from brokers.views import JobView, view
from producers.auth import Admin
from producers.documents import PUBLISH, answer, failures
from producers.limits import PAGE, PAGE_MOST
from producers.platform import Platform, platform_of
from producers.problems import Problem
from producers.replies import reply
from producers.submission import Draft, submit

router = APIRouter(tags=["dead letters"])

_ONE = failures("dead_letter_not_found", "broker_unavailable")


class DeadLetterList(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest first."""

    object: str = "list"
    data: list[DeadLetter]


@router.get("/v1/dead", responses={200: answer("The letters", DeadLetterList), **failures("broker_unavailable")})
async def list_dead_letters(
    request: Request, _: Admin, limit: Annotated[int, Query(ge=1, le=PAGE_MOST, description="Of them at most")] = PAGE
) -> Response:
    """Messages in this region's dead-letter queue, the oldest first."""
    letters = await _letters(request).oldest(limit)
    return reply(DeadLetterList(data=await asyncio.gather(*(_with_status(request, letter) for letter in letters))))


@router.get("/v1/dead/{job_id}", responses={200: answer("The letter", DeadLetter), **_ONE})
async def show_dead_letter(request: Request, job_id: str, _: Admin) -> Response:
    """One dead letter."""
    async with _letters(request).hold(job_id) as held:
        return reply(await _with_status(request, held.letter))


@router.post(
    "/v1/dead/{job_id}/replay",
    status_code=202,
    responses={
        202: answer("The new job", JobView),
        **failures("dead_letter_not_found", "dead_letter_unreadable", "newer_request", *PUBLISH),
    },
)
async def replay_dead_letter(request: Request, job_id: str, _: Admin) -> Response:
    """Submit the same again as a new job of the same tenant. The letter is dropped once that is safe."""
    platform = platform_of(request)
    async with _letters(request).hold(job_id) as held:
        job = await submit(platform, await _draft(platform, held))
        await held.drop()
    return reply(view(job, platform.store.stream_key(job)), 202)


@router.delete("/v1/dead/{job_id}", status_code=204, responses={204: answer("It is gone"), **_ONE})
async def drop_dead_letter(request: Request, job_id: str, _: Admin) -> Response:
    """Drop a dead letter. Its job's record stays as it is."""
    async with _letters(request).hold(job_id) as held:
        await held.drop()
    return Response(status_code=204)


def _letters(request: Request) -> DeadLetters:
    return DeadLetters(platform_of(request).settings)


async def _with_status(request: Request, letter: DeadLetter) -> DeadLetter:
    record = await _record(platform_of(request), letter.job)
    return msgspec.structs.replace(letter, status=record.state.value if record else None)


async def _draft(platform: Platform, held: Held) -> Draft:
    """The letter's job once more. Raises Problem, SealBroken, UnknownSealKey."""
    if held.envelope is None:
        raise Problem("dead_letter_unreadable", "this message is no job's")
    old = held.envelope.to_job()
    spec = platform.sealer.open(old, held.envelope.sealed_spec())
    record = await _record(platform, old.id)
    return Draft(
        tenant=old.tenant,
        model=old.model,
        lane=old.lane,
        spec=spec,
        expires_s=min(_lifetime_s(old), platform.settings.max_expires_s),
        metadata=record.metadata if record else {},
        webhook=platform.sealer.open_webhook(old, old.webhook) if old.webhook else None,
    )


def _lifetime_s(job: Job) -> int:
    # From its creation: a message does not say when its job was to start.
    return max(1, (job.deadline_ms - job.created_ms) // 1000)


async def _record(platform: Platform, job_id: str) -> Job | None:
    try:
        home = await platform.home(job_id)
    except JobNotFound:  # no job's id, or of a region unknown here
        return None
    return await home.store.get(job_id)


STRUCTS = (DeadLetter, DeadLetterList)
