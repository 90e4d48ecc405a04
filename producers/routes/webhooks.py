"""Webhooks that were given up: list them, have them told again. For whoever runs the platform."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from brokers import webhooks
from brokers.webhooks import DeadWebhook
from producers.auth import Admin
from producers.documents import answer, failures
from producers.limits import PAGE, PAGE_MOST
from producers.platform import platform_of
from producers.problems import Problem
from producers.replies import reply

router = APIRouter(tags=["webhooks"])


class DeadWebhookList(msgspec.Struct, frozen=True, kw_only=True):
    """Those given up, the latest first."""

    object: str = "list"
    data: list[DeadWebhook]


@router.get(
    "/v1/webhooks/dead", responses={200: answer("The webhooks", DeadWebhookList), **failures("invalid_parameter")}
)
async def list_dead_webhooks(
    request: Request, _: Admin, limit: Annotated[int, Query(ge=1, le=PAGE_MOST, description="Of them at most")] = PAGE
) -> Response:
    """Webhooks that were never heard, as long as their jobs are kept."""
    platform = platform_of(request)
    return reply(DeadWebhookList(data=await webhooks.dead(platform.settings, platform.store, limit)))


@router.post(
    "/v1/webhooks/dead/{job_id}/replay",
    status_code=202,
    responses={202: answer("It is due"), **failures("dead_webhook_not_found")},
)
async def replay_dead_webhook(request: Request, job_id: str, _: Admin) -> Response:
    """Tell it again, with all tries."""
    platform = platform_of(request)
    if not await webhooks.replay(platform.settings, platform.store, job_id):
        raise Problem("dead_webhook_not_found", "no webhook of this job was given up")
    return Response(status_code=202)


STRUCTS = (DeadWebhookList, DeadWebhook)
