"""What a job wrote, whole, read from its stream: a text, or vectors."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from brokers import entries
from brokers.chunk_reader import ChunkReader
from brokers.errors import StreamGap, StreamGone
from brokers.job import Content, Control, Entry, FinishReason, Job, Kind, State, Usage
from brokers.spelling import Spelling
from brokers.views import Result
from producers.limits import REPLAY_S
from producers.scores import Score, scores, worded
from producers.tails import is_end
from producers.vectors import Encoding, encode

log = logging.getLogger(__name__)

WholeT = TypeVar("WholeT", bound="Text | Vectors")


class End(msgspec.Struct, frozen=True):
    """A stream's terminal entry."""

    status: State
    finish_reason: FinishReason
    usage: Usage
    digest: str = ""
    error: dict[str, str] | None = None


class Wording(NamedTuple):
    """How a result is worded."""

    encoding: Encoding  # of embeddings
    spelling: Spelling  # of tokens


class Text:
    """What a stream has said so far."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self.scores: list[Score] = []
        self.end: End | None = None

    def add(self, entry: Entry) -> None:
        if isinstance(entry, Content):
            self.scores += scores(entry, self._length)
            self._parts.append(entry.text)
            self._length += len(entry.text)
        elif is_end(entry):
            self.end = end_of(entry)
        elif entry.kind == "restarted":
            self._parts, self._length, self.scores = [], 0, []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    async def result(self, how: Wording) -> Result:
        logprobs = worded(self.scores, how.spelling, with_ids=True) if self.scores else UNSET
        reason = self.end.finish_reason if self.end else None
        return Result(text=self.text, logprobs=logprobs, finish_reason=reason)


class Vectors:
    """What the stream of an embedding job has brought so far."""

    def __init__(self) -> None:
        self.vectors: list[bytes] = []
        self.end: End | None = None

    def add(self, entry: Entry) -> None:
        if isinstance(entry, Content):
            self.vectors += entries.split(entry)
        elif is_end(entry):
            self.end = end_of(entry)
        elif entry.kind == "restarted":
            self.vectors.clear()

    async def result(self, how: Wording) -> Result:
        embeddings = await encode(self.vectors, how.encoding)
        return Result(embeddings=embeddings, finish_reason=self.end.finish_reason if self.end else None)


def end_of(entry: Control) -> End:
    return msgspec.convert(entry.data, End)


async def read(reader: ChunkReader, job: Job) -> Text | Vectors:
    """All up to the stream's end, waiting for it. Raises StreamGone, StreamGap."""
    return await read_into(Vectors() if job.kind is Kind.EMBEDDING else Text(), reader, job)


async def read_into(whole: WholeT, reader: ChunkReader, job: Job) -> WholeT:
    """As `read`, of a job whose kind is known."""
    async for batch in reader.tail_batches(job):
        for entry in batch:
            whole.add(entry)
    return whole


async def replay(reader: ChunkReader, job: Job, how: Wording) -> Result | None:
    """The result of a job that has ended; None when its stream is not there any more."""
    if job.state is State.WITHDRAWN:
        return None
    try:
        async with asyncio.timeout(REPLAY_S):
            whole = await read(reader, job)
    except (StreamGone, StreamGap, TimeoutError) as error:
        log.warning("what job %s wrote cannot be read: %s", job.id, type(error).__name__)
        return None
    return await whole.result(how)
