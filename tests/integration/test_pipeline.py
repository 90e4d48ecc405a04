"""Reads that are given up: none leaves its answer behind for somebody else's question."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import redis.asyncio as aredis

from brokers import connect, pipeline
from brokers.settings import Settings

_SLOW = ("BLPOP", "nobody-writes-this", 30)  # answered long after it was given up
Ask = Callable[[pipeline.Command, float], Coroutine[Any, Any, list[Any]]]


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[aredis.Redis]:
    client = connect.asynchronous(settings, settings.region)
    assert isinstance(client, aredis.Redis)
    yield client
    await client.aclose()


@pytest.fixture(params=["pool", "line"])
async def ask(request: pytest.FixtureRequest, client: aredis.Redis) -> AsyncIterator[Ask]:
    """One command over either way that this platform reads from Redis."""
    line = pipeline.Line(client, "any")

    async def by_pool(command: pipeline.Command, timeout_s: float) -> list[Any]:
        return await pipeline.exchange(client, [command], timeout_s=timeout_s)

    async def by_line(command: pipeline.Command, timeout_s: float) -> list[Any]:
        return await line.ask([command], timeout_s=timeout_s)

    yield by_pool if request.param == "pool" else by_line
    await line.drop()


async def _blocked(settings: Settings, wanted: int) -> None:
    """Wait until the server says that so many of this kind of read wait in it."""
    watcher = connect.asynchronous(settings, settings.region)
    assert isinstance(watcher, aredis.Redis)
    async with asyncio.timeout(5):
        while sum(one["cmd"] == "blpop" for one in await watcher.client_list()) != wanted:
            await asyncio.sleep(0.01)
    await watcher.aclose()


async def test_a_cancelled_read_does_not_poison_its_connection(settings: Settings, ask: Ask) -> None:
    reading = asyncio.create_task(ask(_SLOW, 60))
    await _blocked(settings, 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [await ask(("ECHO", str(n)), 2) for n in range(3)] == [[b"0"], [b"1"], [b"2"]]
    await _blocked(settings, 0)  # and the server waits for nobody


async def test_a_read_that_is_too_late_does_not_poison_its_connection(settings: Settings, ask: Ask) -> None:
    with pytest.raises(TimeoutError):
        await ask(_SLOW, 0.1)
    assert [await ask(("ECHO", str(n)), 2) for n in range(3)] == [[b"0"], [b"1"], [b"2"]]
    await _blocked(settings, 0)


async def test_a_blocking_read_outlasts_the_deadline_of_other_calls(settings: Settings, ask: Ask) -> None:
    """redis-py has a socket timeout of its own, which a longer block would break."""
    longer_s = settings.store_timeout_s + 0.3
    assert await ask(("BLPOP", "nobody-writes-this", longer_s), longer_s + 5) == [None]
