"""Tails: what is ready leaves together, errors come after what was before them, and sources are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from brokers.errors import StreamGap
from brokers.job import Content, Control, Entry
from producers.tails import Tails

_END = Control(pos=9, n=1, kind="end")


def _text(pos: int) -> Content:
    return Content(start=pos - 1, pos=pos, text=str(pos))


class Source:
    """A stream whose entries the test puts in."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[list[Entry] | Exception] = asyncio.Queue()
        self.closed = False

    async def read(self) -> AsyncIterator[list[Entry]]:
        try:
            while True:
                batch = await self.inbox.get()
                if isinstance(batch, Exception):
                    raise batch
                yield batch
                if batch[-1] is _END:
                    return
        finally:
            self.closed = True


async def _opened(*sources: Source) -> Tails:
    tails = Tails([source.read() for source in sources])
    await tails.open()
    return tails


async def test_everything_that_is_ready_is_taken_at_once() -> None:
    one, two = Source(), Source()
    tails = await _opened(one, two)
    one.inbox.put_nowait([_text(1), _text(2)])
    one.inbox.put_nowait([_END])
    two.inbox.put_nowait([_text(1)])
    await asyncio.sleep(0.01)
    assert await tails.take(1) == [(0, _text(1)), (0, _text(2)), (0, _END), (1, _text(1))]
    assert not tails.ended
    two.inbox.put_nowait([_END])
    assert await tails.take(1) == [(1, _END)]
    assert tails.ended
    await tails.close()


async def test_silence_is_an_empty_take() -> None:
    tails = await _opened(Source())
    assert await tails.take(0.01) == []
    await tails.close()


async def test_a_failure_comes_after_what_was_before_it() -> None:
    source = Source()
    tails = await _opened(source)
    source.inbox.put_nowait([_text(1)])
    source.inbox.put_nowait(StreamGap())
    await asyncio.sleep(0.01)
    assert await tails.take(1) == [(0, _text(1))]
    with pytest.raises(StreamGap):
        await tails.take(1)
    await tails.close()


async def test_a_consumer_that_takes_nothing_holds_the_source_back() -> None:
    source = Source()
    tails = await _opened(source)
    for pos in range(1, 101):
        source.inbox.put_nowait([_text(pos)])
    await asyncio.sleep(0.01)
    assert source.inbox.qsize() > 90
    taken: list[int] = []
    while len(taken) < 100:
        taken += [entry.pos for _, entry in await tails.take(1)]
    assert taken == list(range(1, 101))
    await tails.close()


@pytest.mark.parametrize("batches", [0, 3, 50])
async def test_closing_frees_every_source_wherever_it_was(batches: int) -> None:
    source = Source()
    tails = await _opened(source)
    for pos in range(1, batches + 1):
        source.inbox.put_nowait([_text(pos)])
    await asyncio.sleep(0.01)
    await tails.close()
    assert source.closed


async def test_closing_before_the_first_step_is_fine() -> None:
    source = Source()
    tails = await _opened(source)
    await tails.close()
    assert await tails.take(0.01) == []
