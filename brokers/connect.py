"""Redis connections: one place for their URLs, deadlines and the checks that a store must pass."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio as aredis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from brokers import calls, names
from brokers.errors import ConfigurationError, StoreUnavailable
from brokers.settings import Settings

ERRORS = (RedisError, OSError, TimeoutError)
"""What a driver raises when the store is away or says no."""


def asynchronous(settings: Settings, region: str, *, timeout_s: float | None = None) -> aredis.Redis:
    """A client for asyncio. `timeout_s` bounds every reply; None waits as long as a blocking read asks for."""
    return aredis.Redis.from_url(
        settings.reach(region).redis.get_secret_value(),
        socket_connect_timeout=settings.store_timeout_s,
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),  # a retry of redis-py's own would outlast the caller's deadline
        protocol=3,  # the shape of replies depends on it
    )


def blocking(settings: Settings, region: str, *, timeout_s: float | None = None) -> redis.Redis:
    return redis.Redis.from_url(
        settings.reach(region).redis.get_secret_value(),
        socket_connect_timeout=settings.store_timeout_s,
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=3,
    )


def send(client: redis.Redis, call: calls.Call) -> Any:
    """One call over a blocking client, and its parsed reply."""
    return call.parse(client.execute_command(*call.command))  # type: ignore[no-untyped-call]


def prepare(client: redis.Redis, settings: Settings) -> None:
    """Load the function library and refuse a store that would lose jobs. Raises ConfigurationError."""
    try:
        policy = client.info("memory").get("maxmemory_policy", "noeviction")
        client.function_load(calls.library(), replace=True)
        fixed = _fix_partitions(client, settings)
    except ERRORS as error:
        raise StoreUnavailable(f"Redis cannot be prepared: {type(error).__name__}: {error}") from error
    if policy != "noeviction":
        raise ConfigurationError(
            f"Redis evicts (maxmemory-policy {policy}): it would drop streams and records",
            hint="CONFIG SET maxmemory-policy noeviction",
        )
    if fixed != settings.partitions:
        raise ConfigurationError(f"partitions is {settings.partitions}, but this store was started with {fixed}")


def _fix_partitions(client: redis.Redis, settings: Settings) -> int:
    key = names.meta(settings.region)
    client.hsetnx(key, "partitions", str(settings.partitions))
    return int(client.hget(key, "partitions"))  # type: ignore[arg-type]
