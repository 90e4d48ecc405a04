"""Work that lasts only as long as somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from brokers.job import Job
from producers.platform import Platform
from producers.submission import cancel_all

T = TypeVar("T")


class ReaderGone(Exception):
    """The client has closed its connection."""


class GoingAway(Exception):
    """This process is told to end."""


async def attended(work: Coroutine[Any, Any, T], receive: Receive, platform: Platform) -> T:
    """The work's result. Raises ReaderGone or GoingAway, the work cancelled and its `finally` blocks done."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    ends = {working, watching} | ({platform.closing} if platform.closing else set())
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ReaderGone if watching.done() else GoingAway
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def cancel_after_grace(platform: Platform, jobs: list[Job]) -> None:
    """Cancel jobs whose only reader is gone, a little later; at once when this process ends."""
    grace_s = platform.settings.reader_grace_s
    if platform.closing:
        await asyncio.wait({platform.closing}, timeout=grace_s)
    await cancel_all(platform, jobs)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
