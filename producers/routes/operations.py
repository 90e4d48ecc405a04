"""What operators and their tools ask: is it alive, is it ready, how is it going."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from brokers.errors import StoreUnavailable, Unavailable
from brokers.status import status, workers
from producers.auth import Admin
from producers.documents import answer, failures
from producers.limits import STATUS_DEADLINE_S
from producers.platform import Platform, platform_of
from producers.replies import reply

router = APIRouter(tags=["operations"])


class Health(msgspec.Struct, frozen=True):
    """`ok`, and for readiness each part that this process needs, and how many workers are in which state.

    Workers do not decide readiness: a job is taken, and waits, while none is there.
    """

    status: str
    parts: dict[str, str] = {}
    workers: dict[str, int] = {}


@router.get("/healthz", responses={200: answer("The process is alive", Health)})
async def healthz() -> Response:
    """The process answers; says nothing of what is behind it."""
    return reply(Health("ok"))


@router.get(
    "/readyz",
    responses={200: answer("It can take jobs", Health), 503: answer("It cannot: the part that is not `ok`", Health)},
)
async def readyz(request: Request) -> Response:
    """Whether a job would be taken now. Load balancers ask here."""
    platform = platform_of(request)
    parts, states = await asyncio.gather(_parts(platform), _worker_states(platform))
    ready = all(state == "ok" for state in parts.values())
    return reply(Health("ok" if ready else "unavailable", parts, states), 200 if ready else 503)


@router.get(
    "/metrics",
    responses={200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Metrics of this process, for Prometheus, and what the workers of its region say of themselves."""
    platform = platform_of(request)
    platform.metrics.show_workers(await _reports(platform))
    exposition = platform.metrics.exposition()
    return Response(exposition, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get(
    "/v1/status",
    responses={
        200: {
            "description": "Queues, workers, streams",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        **failures("unavailable", "broker_unavailable"),
    },
)
async def show_status(request: Request, _: Admin) -> Response:
    """Queues with their depths and rates, workers with what they last said, streams."""
    platform = platform_of(request)
    try:
        async with asyncio.timeout(STATUS_DEADLINE_S):
            shown: dict[str, Any] = await status(platform.settings, platform.store)
    except TimeoutError:
        raise Unavailable("The status could not be gathered in time.") from None
    return reply(shown)


async def _worker_states(platform: Platform) -> dict[str, int]:
    """Workers by state: ready, draining, engine_down, out_of_service."""
    return dict(Counter(report["state"] for report in await _reports(platform)))


async def _reports(platform: Platform) -> list[dict[str, Any]]:
    """What each worker last said. Empty when the store cannot be asked."""
    try:
        return await workers(platform.settings, platform.store)
    except StoreUnavailable:
        return []


async def _parts(platform: Platform) -> dict[str, str]:
    try:
        await platform.store.ping()
        store = "ok"
    except StoreUnavailable:
        store = "unreachable"
    closing = platform.closing is not None and platform.closing.done()
    return {
        "store": store,
        "broker": "ok" if platform.publisher.connected else "unreachable",
        "process": "ending" if closing else "ok",
    }


STRUCTS = (Health,)
