"""Jobs: submit, see, list, cancel."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from brokers.errors import JobNotFound, StreamGap, StreamGone
from brokers.job import Job, Kind, State, home_of
from brokers.keys import Principal
from brokers.views import JobView, Result, view
from producers import texts
from producers.attendance import GoingAway, ReaderGone, attended
from producers.auth import Reader, Right, Submitter, authorize
from producers.bodies import decode, read, too_large
from producers.documents import BODY, PROMPT, PUBLISH, Plain, answer, body_of, failures, header, query
from producers.idempotency import KEY, ONCE, REPLAYED, once, submit_once
from producers.limits import PAGE, PAGE_MOST, SCAN_MOST
from producers.platform import Platform, platform_of
from producers.problems import Problem
from producers.replies import reply
from producers.schedules import expires_s, start_ms
from producers.schemas import JobPage, JobRequest
from producers.specs import spec_of
from producers.submission import Draft
from producers.vectors import ENCODING, Encoding, encoding_asked
from producers.webhooks import checked

router = APIRouter(tags=["jobs"])

_decoder = msgspec.json.Decoder(JobRequest)
_ONE = failures("job_not_found")
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)


async def create_job(request: Request) -> Response:
    platform = platform_of(request)
    principal = await authorize(request, Right.SUBMIT)
    raw = await read(request, platform.settings.max_embedding_body_bytes)
    body = decode(_decoder, raw)
    if body.input is None and len(raw) > platform.settings.max_body_bytes:
        raise too_large(platform.settings.max_body_bytes)
    wait_s, encoding = min(_wait_asked(request), platform.settings.wait_max_s), encoding_asked(request)
    (job,), replayed = await submit_once(
        platform, once(request, principal, body), [await _draft(platform, principal, body)]
    )
    response = await _wait(request, platform, job, wait_s, encoding) if wait_s > 0 else _shown(platform, job, 202)
    response.headers.update(REPLAYED if replayed else {})
    return response


@router.get("/v1/jobs/{job_id}", responses={200: answer("The job, with its result once it has ended", JobView), **_ONE})
async def show_job(
    request: Request,
    job_id: str,
    caller: Reader,
    encoding_format: Annotated[Encoding, Query(description=ENCODING)] = Encoding.FLOAT,
) -> Response:
    """A job's state, and its result once it has ended."""
    platform = platform_of(request)
    job = await platform.job(caller, job_id)
    return _shown(platform, job, 200, await _replayed(platform, job, encoding_format) if job.ended else None)


@router.get(
    "/v1/jobs",
    responses={200: answer("Jobs, newest first", JobPage), **failures("bad_cursor", "invalid_parameter")},
)
async def list_jobs(
    request: Request,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=PAGE_MOST, description="Jobs at most")] = PAGE,
    before: Annotated[str | None, Query(description="A job id; older ones follow")] = None,
    status: Annotated[State | None, Query(description="Only jobs in this state")] = None,
) -> Response:
    """Your jobs, newest first. With `status` a page may be short, or empty, while `has_more` is true."""
    platform = platform_of(request)
    if before is not None and home_of(before) != platform.settings.region:
        raise Problem("bad_cursor", "before is no job id of this region", param="before")
    jobs, has_more, last = await _scan(platform, caller.tenant, limit, before, status)
    page = JobPage(
        data=[view(job, platform.store.stream_key(job)) for job in jobs],
        has_more=has_more,
        next_before=last if has_more else None,
    )
    return reply(page)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    responses={
        200: answer("The job has ended: by this, or before", JobView),
        202: answer("The job is asked to stop, and will within a second", JobView),
        **_ONE,
    },
)
async def cancel_job(request: Request, job_id: str, caller: Submitter) -> Response:
    """Stop a job. Asking again, or too late, is no error: the answer is the job as it stands."""
    platform = platform_of(request)
    job = await platform.job(caller, job_id)
    home = await platform.home(job_id)
    if await home.store.cancel(job) is None:
        raise JobNotFound
    await home.store.durable(job)  # what was said to be cancelled stays so, whatever is killed now
    now = await platform.job(caller, job_id)
    return _shown(platform, now, 200 if now.ended else 202)


@router.delete("/v1/jobs/{job_id}", status_code=204, responses={204: answer("Nothing of it is left"), **_ONE})
async def erase_job(request: Request, job_id: str, caller: Submitter) -> Response:
    """Delete a job with its text, now. One that still runs ends; what it has used is still accounted for."""
    platform = platform_of(request)
    job = await platform.job(caller, job_id)
    home = await platform.home(job_id)
    if await home.store.erase(job) is None:
        raise JobNotFound
    await home.store.durable(job)
    return Response(status_code=204)


async def _draft(platform: Platform, principal: Principal, body: JobRequest) -> Draft:
    _refuse_what_is_to_come(platform, body)
    model = platform.registry.get(body.model)
    return Draft(
        tenant=principal.tenant,
        model=model.card.name,
        lane=body.lane,
        spec=await spec_of(platform, model, body),
        expires_s=expires_s(platform.settings, body),
        metadata=body.metadata or {},
        start_ms=start_ms(platform.settings, body, time.time()),
        webhook=checked(platform.settings, body.webhook),
    )


def _refuse_what_is_to_come(platform: Platform, body: JobRequest) -> None:
    if body.residency not in (msgspec.UNSET, b"null"):
        raise Problem("not_supported_yet", "residency is not supported yet", param="residency")
    if body.kind is Kind.IMAGE:
        raise Problem("not_supported_yet", f"jobs of kind {body.kind} are not supported yet", param="kind")
    if body.region not in (None, platform.settings.region):
        here = platform.settings.region
        raise Problem(
            "not_supported_yet", f"choosing a region is not supported yet; this one is {here}", param="region"
        )


def _wait_asked(request: Request) -> float:
    """Seconds of `Prefer: wait=N`; a preference that is not understood is ignored (RFC 7240)."""
    found = _WAIT.search(request.headers.get("prefer", ""))
    return float(found.group(1)) if found else 0.0


async def _wait(request: Request, platform: Platform, job: Job, wait_s: float, encoding: Encoding) -> Response:
    home = await platform.home(job.id)
    try:
        whole = await attended(_read(platform, job, wait_s), request.receive, platform)
    except (TimeoutError, GoingAway, ReaderGone, StreamGone, StreamGap):
        whole = None
    now = await home.store.get(job.id) or job
    result = await whole.result(_wording(platform, job, encoding)) if whole and now.ended else None
    response = _shown(platform, now, 200 if now.ended else 202, result)
    response.headers["Preference-Applied"] = f"wait={wait_s:g}"
    return response


async def _read(platform: Platform, job: Job, wait_s: float) -> texts.Text | texts.Vectors:
    home = await platform.home(job.id)
    async with asyncio.timeout(wait_s):
        return await texts.read(home.reader, job)


async def _replayed(platform: Platform, job: Job, encoding: Encoding) -> Result | None:
    home = await platform.home(job.id)
    return await texts.replay(home.reader, job, _wording(platform, job, encoding))


def _wording(platform: Platform, job: Job, encoding: Encoding) -> texts.Wording:
    return texts.Wording(encoding, platform.registry.spelling(job.model))


def _shown(platform: Platform, job: Job, status: int, result: Result | None = None) -> Response:
    shown = view(job, platform.store.stream_key(job), result)
    return reply(shown, status, {"Location": shown.urls.self} if status == 202 else None)


async def _scan(
    platform: Platform, tenant: str, limit: int, before: str | None, status: State | None
) -> tuple[list[Job], bool, str | None]:
    """Up to `limit` jobs, whether there may be more, and the last one looked at."""
    found: list[Job] = []
    size = limit + 1 if status is None else PAGE_MOST
    for _ in range(SCAN_MOST // PAGE_MOST):
        page = await platform.store.list_jobs(tenant, size, before)
        found += [job for job in page if status in (None, job.state)]
        if len(found) > limit:
            return found[:limit], True, found[limit - 1].id
        if len(page) < size:
            return found, False, None
        before = page[-1].id
    return found, True, before


PLAIN = (
    Plain(
        "POST",
        "/v1/jobs",
        create_job,
        {
            "tags": ["jobs"],
            "operationId": "create_job",
            "summary": "Create Job",
            "description": "Submit a job. 202 means that the broker has it safe, or for a job that starts later, the "
            "store. With `Prefer: wait=N` the answer "
            "waits up to N seconds for the job to end, and is 200 with its result when it does.",
            "parameters": [
                KEY,
                header("Prefer", "`wait=N`: wait up to N seconds for the result"),
                query("encoding_format", "string", ENCODING, enum=list(Encoding)),
            ],
            "requestBody": body_of(JobRequest),
            "responses": {
                200: answer("The job has ended within the wait", JobView),
                202: answer("The job is queued", JobView),
                **failures(*BODY, *PROMPT, *PUBLISH, *ONCE, "not_supported_yet", "unsupported_parameter"),
            },
        },
    ),
)
STRUCTS = (JobRequest, JobView, JobPage)
