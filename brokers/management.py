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
    reach = settings.reach(region)
    if reach.management is None:
        raise BrokerUnavailable(f"regions.{region}.management is not set")
    base = urlsplit(reach.management.get_secret_value())
    vhost = quote(unquote(urlsplit(reach.amqp.get_secret_value()).path[1:]) or "/", safe="")
    login = (unquote(base.username or ""), unquote(base.password or ""))
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, auth=login) as client:
            answer = await client.get(f"{base.scheme}://{base.hostname}:{base.port}/api/queues/{vhost}")
            answer.raise_for_status()
            found: list[dict[str, Any]] = answer.json()
    except httpx.HTTPError as error:
        raise BrokerUnavailable(f"RabbitMQ's management API: {type(error).__name__}") from error
    return found


async def depths(settings: Settings, region: str) -> dict[str, int]:
    """Messages in each queue, delivered ones included, some seconds old; a queue not counted yet is left out.

    Raises BrokerUnavailable."""
    found = await queues(settings, region)
    return {queue["name"]: queue["messages"] for queue in found if "messages" in queue}
