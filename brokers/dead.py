"""The dead-letter queue: what workers gave up on, looked at, put back, replayed or dropped. No prompt is opened here.

To look is to take: a message read from a queue is away from it until it is put back. So every look takes messages one
by one, and puts back, when its connection closes at the latest, all but those it was told to drop. Two lookers at once
may each miss what the other holds; asking again finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import UTC
from typing import Any, NamedTuple

import msgspec
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from brokers import envelope, names, topology
from brokers.envelope import Envelope
from brokers.errors import BrokerUnavailable, LingbotError
from brokers.settings import Settings

_SCAN_MOST = 10_000  # messages one search takes from the queue


class DeadLetterNotFound(LingbotError):
    """There is no such dead letter."""

    code = "dead_letter_not_found"
    hint = "GET /v1/dead lists those there are."


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was given up, without what is sealed in it."""

    job: str  # its id; of a message that cannot be read, what the sender called it
    object: str = "dead_letter"
    readable: bool  # it is a job's message, and may be replayed
    tenant: str | None = None
    model: str | None = None
    lane: str | None = None
    gen: int | None = None
    created_at: float | None = None  # unix seconds
    died_at: float | None = None
    status: str | None = None  # of the job now, when its record is still there
    queue: str | None = None  # the last one it was in
    reason: str | None = None  # rejected: a worker gave it up; else the broker's own
    bytes: int


class Held:
    """The messages of one job, taken from the queue."""

    def __init__(self, channel: BlockingChannel, queue: str, messages: list[_Message]) -> None:
        self._channel = channel
        self._queue = queue
        self._messages = messages
        self.letter = messages[0].letter
        self.envelope = messages[0].envelope

    async def drop(self) -> None:
        """For good. Raises BrokerUnavailable: then they may still be there."""
        await asyncio.to_thread(self._drop)

    def _drop(self) -> None:
        with _translated():
            for message in self._messages:
                self._channel.basic_ack(message.tag)
            self._channel.queue_declare(self._queue, passive=True)  # its answer says that all before it was done


class DeadLetters:
    """One region's dead-letter queue. Every call raises BrokerUnavailable when RabbitMQ does not answer."""

    def __init__(self, settings: Settings, region: str | None = None) -> None:
        self._settings = settings
        self._region = region or settings.region
        self._queue = names.dead_queue(self._region)

    async def oldest(self, limit: int) -> list[DeadLetter]:
        """The oldest `limit` of them, oldest first."""
        return await asyncio.to_thread(self._oldest, limit)

    @asynccontextmanager
    async def hold(self, job_id: str) -> AsyncIterator[Held]:
        """A job's messages; what the block does not drop goes back. Raises DeadLetterNotFound."""
        stack = ExitStack()
        try:
            yield await asyncio.to_thread(self._take, stack, job_id)
        finally:
            await asyncio.to_thread(stack.close)

    def _oldest(self, limit: int) -> list[DeadLetter]:
        with self._open() as channel:
            return [message.letter for message in self._messages(channel, limit)]

    def _take(self, stack: ExitStack, job_id: str) -> Held:
        channel = stack.enter_context(self._open())
        with _translated():
            found = [message for message in self._messages(channel, _SCAN_MOST) if message.letter.job == job_id]
        if not found:
            raise DeadLetterNotFound
        return Held(channel, self._queue, found)

    @contextmanager
    def _open(self) -> Iterator[BlockingChannel]:
        with _translated(), topology.connection(self._settings, self._region) as connection:
            yield connection.channel()

    def _messages(self, channel: BlockingChannel, most: int) -> Iterator[_Message]:
        for _ in range(most):
            method, properties, body = channel.basic_get(self._queue)
            if method is None:
                return
            yield _read(method.delivery_tag, properties, body)


class _Message(NamedTuple):
    tag: int
    letter: DeadLetter
    envelope: Envelope | None


def _read(tag: int, properties: BasicProperties, body: bytes) -> _Message:
    deaths = (properties.headers or {}).get("x-death") or [{}]
    death: dict[str, Any] = deaths[0]
    died_at = death["time"].replace(tzinfo=UTC).timestamp() if "time" in death else None
    try:
        found = envelope.decode(body)
    except msgspec.MsgspecError:
        found = None
    letter = DeadLetter(
        job=found.job if found else properties.message_id or f"unnamed-{tag}",
        readable=found is not None,
        tenant=found.tenant if found else None,
        model=found.model if found else None,
        lane=found.lane if found else None,
        gen=found.gen if found else None,
        created_at=found.created_ms / 1000 if found else None,
        died_at=died_at,
        queue=death.get("queue"),
        reason=death.get("reason"),
        bytes=len(body),
    )
    return _Message(tag, letter, found)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (AMQPError, OSError) as error:
        raise BrokerUnavailable(f"RabbitMQ's dead-letter queue: {type(error).__name__}") from error
