"""A job's whole text, read from its stream."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from brokers.chunk_reader import ChunkReader
from brokers.errors import StreamGap, StreamGone
from brokers.job import Content, Control, Entry, FinishReason, Job, State, Usage
from brokers.views import Result
from producers.limits import REPLAY_S
from producers.tails import is_end

log = logging.getLogger(__name__)


class End(msgspec.Struct, frozen=True):
    """A stream's terminal entry."""

    status: State
    finish_reason: FinishReason
    usage: Usage
    digest: str = ""
    error: dict[str, str] | None = None


class Text:
    """What a stream has said so far."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.end: End | None = None

    def add(self, entry: Entry) -> None:
        if isinstance(entry, Content):
            self._parts.append(entry.text)
        elif is_end(entry):
            self.end = end_of(entry)
        elif entry.kind == "restarted":
            self._parts.clear()

    @property
    def result(self) -> Result:
        return Result(text="".join(self._parts), finish_reason=self.end.finish_reason if self.end else None)


def end_of(entry: Control) -> End:
    return msgspec.convert(entry.data, End)


async def read(reader: ChunkReader, job: Job) -> Text:
    """The text up to the stream's end, waiting for it. Raises StreamGone, StreamGap."""
    text = Text()
    async for batch in reader.tail_batches(job):
        for entry in batch:
            text.add(entry)
    return text


async def replay(reader: ChunkReader, job: Job) -> Result | None:
    """The result of a job that has ended; None when its stream is not there any more."""
    if job.state is State.WITHDRAWN:
        return None
    try:
        async with asyncio.timeout(REPLAY_S):
            return (await read(reader, job)).result
    except (StreamGone, StreamGap, TimeoutError) as error:
        log.warning("the text of job %s cannot be read: %s", job.id, type(error).__name__)
        return None
