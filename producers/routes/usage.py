"""What a tenant has used, by day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from brokers.job import TERMINAL, WORD
from producers.auth import Reader, Right
from producers.documents import answer, failures
from producers.platform import platform_of
from producers.problems import Problem
from producers.replies import reply

router = APIRouter(tags=["usage"])


class UsageDay(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that ended in one UTC day, and their tokens; each job is counted once, seconds after its end."""

    object: str = "usage"
    tenant: str
    day: str
    jobs: int
    prompt_tokens: int
    completion_tokens: int
    by_status: dict[str, int]


@router.get(
    "/v1/usage", responses={200: answer("The usage", UsageDay), **failures("invalid_parameter", "missing_scope")}
)
async def show_usage(
    request: Request,
    caller: Reader,
    day: Annotated[str | None, Query(description="UTC, as in 2026-11-30; today when not given")] = None,
    tenant: Annotated[str | None, Query(description="Another tenant, for keys with the scope admin")] = None,
) -> Response:
    """What you have used in one day."""
    tenant = tenant or caller.tenant
    if tenant != caller.tenant and Right.ADMIN not in caller.scopes:
        raise Problem("missing_scope", f"another tenant's usage needs a key with the scope {Right.ADMIN.value!r}")
    if not WORD.match(tenant):
        raise Problem("invalid_parameter", "tenant is no tenant's id", param="tenant")
    day = _day(day)
    counted = await platform_of(request).store.usage(tenant, day)
    return reply(
        UsageDay(
            tenant=tenant,
            day=day,
            jobs=counted.get("jobs", 0),
            prompt_tokens=counted.get("prompt_tokens", 0),
            completion_tokens=counted.get("completion_tokens", 0),
            by_status={state.value: counted[state.value] for state in sorted(TERMINAL) if state.value in counted},
        )
    )


def _day(asked: str | None) -> str:
    if asked is None:
        return datetime.now(UTC).date().isoformat()
    try:
        return datetime.strptime(asked, "%Y-%m-%d").replace(tzinfo=UTC).date().isoformat()
    except ValueError:
        raise Problem("invalid_parameter", "day: give a date, as in 2026-11-30", param="day") from None


STRUCTS = (UsageDay,)
