"""RabbitMQ's management API: queue depths and rates, for status and for the reconciler."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx

from brokers.errors import BrokerUnavailable
from brokers.settings import Settings

_TIMEOUT_S = 2.0


async def queues(settings: Settings, region: str) -> list[dict[str, Any]]:
    """Every queue of a region as the management API tells it. Raises BrokerUnavailable."""
    found: list[dict[str, Any]] = await _get(settings, region, "")
    return found


async def queue_depth(settings: Settings, region: str, name: str) -> int | None:
    """Messages in a queue, delivered ones included, some seconds old; None while the broker has not counted yet.

    Raises BrokerUnavailable."""
    found = await _get(settings, region, "/" + quote(name, safe=""))
    depth: int | None = found.get("messages")
    return depth


async def _get(settings: Settings, region: str, path: str) -> Any:
    reach = settings.reach(region)
    if reach.management is None:
        raise BrokerUnavailable(f"regions.{region}.management is not set")
    base = urlsplit(reach.management.get_secret_value())
    vhost = quote(unquote(urlsplit(reach.amqp.get_secret_value()).path[1:]) or "/", safe="")
    url = f"{base.scheme}://{base.hostname}:{base.port}/api/queues/{vhost}{path}"
    login = (unquote(base.username or ""), unquote(base.password or ""))
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, auth=login) as client:
            answer = await client.get(url)
            answer.raise_for_status()
            return answer.json()
    except httpx.HTTPError as error:
        raise BrokerUnavailable(f"RabbitMQ's management API: {type(error).__name__}") from error
