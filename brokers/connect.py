"""Redis connections: one place for their URLs, deadlines and the checks that a store must pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
import redis.asyncio as aredis
from redis.asyncio.connection import parse_url as parse_async_url
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from brokers import address, calls, names, pipeline
from brokers.address import Address, Layout, Node
from brokers.cluster import AsyncCluster, BlockingCluster
from brokers.errors import ConfigurationError, StoreUnavailable
from brokers.settings import Settings

ERRORS = (RedisError, OSError, TimeoutError)
"""What a driver raises when the store is away or says no."""

_SENTINEL_S = 0.4  # a Sentinel that does not answer has others beside it

Asynchronous = aredis.Redis | AsyncCluster
Blocking = redis.Redis | BlockingCluster


def asynchronous(settings: Settings, region: str) -> Asynchronous:
    """A client for asyncio. It waits for ever: pipeline.exchange and pipeline.Line have the deadlines."""
    at = _address(settings, region)
    options = {**_options(settings, None), "retry": AsyncRetry(NoBackoff(), 0)}
    match at.layout:
        case Layout.CLUSTER:
            return AsyncCluster(at.nodes, lambda node: aredis.Redis.from_url(at.at(node), **options))
        case Layout.SENTINEL:
            pool = AsyncSentinelPool(  # type: ignore[no-untyped-call]
                at.service, _sentinels(at, AsyncSentinel), **_endless(parse_async_url(at.at(at.nodes[0]))), **options
            )
            return aredis.Redis.from_pool(pool)
        case _:
            return aredis.Redis.from_url(at.url, **options)


def blocking(settings: Settings, region: str, *, timeout_s: float | None = None) -> Blocking:
    """A client for threads. `timeout_s` bounds every reply; None waits as long as a blocking read asks for."""
    at = _address(settings, region)
    options = _options(settings, timeout_s)
    match at.layout:
        case Layout.CLUSTER:
            return BlockingCluster(at.nodes, lambda node: redis.Redis.from_url(at.at(node), **options))
        case Layout.SENTINEL:
            endless = _endless(parse_url(at.at(at.nodes[0])))  # type: ignore[no-untyped-call]
            pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
                at.service, _sentinels(at, Sentinel), **endless, **options
            )
            return redis.Redis.from_pool(pool)
        case _:
            return redis.Redis.from_url(at.url, **options)


def send(client: Blocking, call: calls.Call) -> Any:
    """One call over a blocking client, and its parsed reply. Raises ERRORS."""
    (reply,) = send_all(client, [call])
    if isinstance(reply, Exception):
        raise reply
    return call.parse(reply)


def send_all(client: Blocking, sent: Sequence[calls.Call]) -> list[Any]:
    """Many calls in one round trip: their replies unparsed, errors among them. Raises ERRORS.

    Over a Cluster the calls for a server that is away have its error for their reply, and the others go on.
    """
    commands = [call.command for call in sent]
    replies = _pipelined(client, commands) if isinstance(client, redis.Redis) else client.exchange(commands)
    if any(map(lacks_functions, replies)):
        load_functions(client)
    return replies


def _pipelined(client: redis.Redis, commands: Sequence[pipeline.Command]) -> list[Any]:
    pipe = client.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)  # type: ignore[no-untyped-call]
    replies = list(pipe.execute(raise_on_error=False))
    if any(isinstance(reply, ReadOnlyError) for reply in replies):
        client.connection_pool.disconnect()  # whoever is the primary now may answer at the same address
    return replies


def lacks_functions(reply: Any) -> bool:
    """Whether a reply comes from a server that began anew, or joined, and has no function library yet."""
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)


def load_functions(client: Blocking) -> None:
    """Put the library on every server that takes writes; its replicas get it from there. Raises ERRORS."""
    for primary in primaries(client):
        primary.function_load(calls.library(), replace=True)


def one_server(client: Blocking) -> redis.Redis:
    """A server that hears what is published on any; the client itself where there is one alone. Raises ERRORS."""
    return client if isinstance(client, redis.Redis) else primaries(client)[0]


def primaries(client: Blocking) -> list[redis.Redis]:
    """A client for each server that takes writes. Raises ERRORS."""
    return [client] if isinstance(client, redis.Redis) else client.primaries()


def prepare(client: Blocking, settings: Settings) -> None:
    """Load the function library and refuse a store that would lose jobs. Raises ConfigurationError."""
    try:
        _check_policies(client, settings)
        load_functions(client)
        fixed = _fix_partitions(client, settings)
    except ERRORS as error:
        raise StoreUnavailable(f"Redis cannot be prepared: {type(error).__name__}: {error}") from error
    if fixed != settings.partitions:
        raise ConfigurationError(f"partitions is {settings.partitions}, but this store was started with {fixed}")


def _check_policies(client: Blocking, settings: Settings) -> None:
    for server in primaries(client):
        _check_policy(server)
    for replica in _replicas(client, settings):  # one of them may be the next primary
        with suppress(*ERRORS):
            _check_policy(replica)


def _check_policy(server: redis.Redis) -> None:
    policy = server.info("memory").get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigurationError(
            f"Redis evicts (maxmemory-policy {policy}): it would drop streams and records",
            hint="CONFIG SET maxmemory-policy noeviction",
        )


def _replicas(client: Blocking, settings: Settings) -> list[redis.Redis]:
    if not isinstance(client, redis.Redis):
        return client.servers()
    pool = client.connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return []
    at = _address(settings, settings.region)
    found = pool.sentinel_manager.discover_slaves(at.service)
    options = _options(settings, settings.store_timeout_s)
    return [redis.Redis.from_url(at.at(Node(host, port)), **options) for host, port in found]


def _fix_partitions(client: Blocking, settings: Settings) -> int:
    key = names.meta(settings.region)
    send(client, calls.Call(("HSETNX", key, "partitions", str(settings.partitions)), bool))
    return int(send(client, calls.Call(("HGET", key, "partitions"), int)))


def _address(settings: Settings, region: str) -> Address:
    return address.parse(settings.reach(region).redis.get_secret_value())


def _options(settings: Settings, timeout_s: float | None) -> dict[str, Any]:
    return {
        "socket_connect_timeout": settings.store_timeout_s,
        "socket_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),  # a retry of redis-py's own would outlast the caller's deadline
        "protocol": 3,  # the shape of replies depends on it
    }


def _endless(parsed: Any) -> dict[str, Any]:
    """A URL's options for a pool whose server Sentinel names."""
    options = dict(parsed)
    tls = options.pop("connection_class", None) is not None
    for name in ("host", "port"):
        options.pop(name, None)
    return {**options, "ssl": tls}


def _sentinels(at: Address, kind: Any) -> Any:
    """The group of Sentinels, which knows who the primary is now."""
    username, password = at.sentinel_login
    asked: dict[str, Any] = {
        "socket_connect_timeout": _SENTINEL_S,
        "socket_timeout": _SENTINEL_S,
        "retry": Retry(NoBackoff(), 0),
        "username": username or None,
        "password": password or None,
        "ssl": at.tls,
    }
    return kind([(node.host, node.port) for node in at.nodes], sentinel_kwargs=asked)
