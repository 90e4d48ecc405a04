"""Work ends with its reader, and with the process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from producers.attendance import GoingAway, ReaderGone, attended
from producers.platform import Platform


class Work:
    """Runs until the test says so."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.undone = False

    async def run(self) -> str:
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # what it has to put away takes a moment
            self.undone = True
            raise
        return "done"


class Client:
    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def _process() -> Platform:
    closing = asyncio.get_running_loop().create_future()
    return cast(Platform, SimpleNamespace(closing=closing))


async def test_the_result_is_the_works() -> None:
    work, client = Work(), Client()
    work.go_on.set()
    assert await attended(work.run(), client.receive, _process()) == "done"


async def test_an_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await attended(fail(), Client().receive, _process())


async def test_a_reader_that_leaves_ends_the_work_before_it_is_told() -> None:
    work, client = Work(), Client()
    attending = asyncio.ensure_future(attended(work.run(), client.receive, _process()))
    await asyncio.sleep(0)
    client.left.set()
    with pytest.raises(ReaderGone):
        await attending
    assert work.undone


async def test_a_process_that_ends_takes_the_work_with_it() -> None:
    work, process = Work(), _process()
    attending = asyncio.ensure_future(attended(work.run(), Client().receive, process))
    await asyncio.sleep(0)
    assert process.closing is not None
    process.closing.set_result(None)
    with pytest.raises(GoingAway):
        await attending
    assert work.undone


async def test_being_cancelled_itself_leaves_nothing_running() -> None:
    work = Work()
    attending = asyncio.ensure_future(attended(work.run(), Client().receive, _process()))
    await asyncio.sleep(0)
    attending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attending
    assert work.undone
