"""Confirmed publishing over asyncio: many messages in flight on one channel, each with a deadline.

RabbitMQ acknowledges a message it could not route, so `mandatory` is set and a return, which comes before its
acknowledgement, decides. While the broker has an alarm it stops reading from us: `connection.blocked` fails the waiting
publishes at once instead of letting them hang.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import Any

from pika.adapters.asyncio_connection import AsyncioConnection
from pika.channel import Channel
from pika.spec import Basic

from brokers import envelope, names, topology
from brokers.errors import BrokerUnavailable, ConfigurationError, LingbotError, QueueFull, Unroutable
from brokers.job import Job
from brokers.settings import Settings

log = logging.getLogger(__name__)

_AT_ONCE = nullcontext()
_RECONNECT_S = (0.1, 0.2, 0.5, 1.0)  # then the last one again and again


class _Connection(AsyncioConnection):  # type: ignore[misc]
    """Sends what one turn of the event loop brought at once: pika would make three system calls a message."""

    _unsent: list[bytes] | None = None

    def _adapter_emit_data(self, data: bytes) -> None:
        if self._unsent is None:
            self._unsent = []
            self.ioloop.call_soon(self._send_unsent)
        self._unsent.append(data)

    def _send_unsent(self) -> None:
        data, self._unsent = b"".join(self._unsent or ()), None
        if self._transport is not None:
            super()._adapter_emit_data(data)


class Publisher:
    """Publishes to one region's exchange, and reconnects for ever."""

    def __init__(self, settings: Settings, region: str | None = None) -> None:
        self._settings = settings
        self._region = region or settings.region
        self._channel: Channel | None = None
        self._blocked = False
        self._keeper: asyncio.Task[None] | None = None
        self._window = asyncio.Semaphore(settings.publish_window)
        self._unconfirmed: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self._returned: set[str] = set()
        self._next_tag = 1

    async def open(self) -> None:
        """Connect, and keep connected. Raises BrokerUnavailable when the first try fails."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep_connected(first))
        await first

    async def close(self) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    @property
    def connected(self) -> bool:
        return self._channel is not None and not self._blocked

    async def publish(self, job: Job, sealed: bytes, trace: str | None = None) -> None:
        """Return once the broker has the job's message safe.

        Raises Unroutable, QueueFull or BrokerUnavailable within `publish_timeout_s`; after BrokerUnavailable the
        message may have arrived all the same.
        """
        properties, body = envelope.encode(envelope.pack(job, sealed, trace))
        deadline = asyncio.get_running_loop().time() + self._settings.publish_timeout_s
        await self._enter_window(deadline)
        try:
            await self._send(job, properties, body, deadline)
        finally:
            self._window.release()

    async def ensure(self, models: list[str]) -> None:
        """Declare the queues of these models."""
        await asyncio.to_thread(topology.declare, self._settings, models, self._region)

    async def _enter_window(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline) if self._window.locked() else _AT_ONCE:
                await self._window.acquire()
        except TimeoutError:
            raise BrokerUnavailable from None

    async def _send(self, job: Job, properties: Any, body: bytes, deadline: float) -> None:
        channel = self._channel
        if channel is None or self._blocked:
            raise BrokerUnavailable("The message broker is away." if channel is None else "The message broker is full.")
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        loop = asyncio.get_running_loop()
        confirmed: asyncio.Future[None] = loop.create_future()
        self._unconfirmed[tag] = (job.id, confirmed)
        channel.basic_publish(
            names.EXCHANGE, names.routing_key(job.model, job.lane), body, properties=properties, mandatory=True
        )
        # A plain timer: `asyncio.timeout` costs 9 us, which is a fortieth of a whole submission.
        timer = loop.call_at(deadline, _settle, confirmed, BrokerUnavailable())
        try:
            await confirmed
        finally:
            timer.cancel()

    # --- the connection ---------------------------------------------------------------------------------------

    async def _keep_connected(self, first: asyncio.Future[None]) -> None:
        failures = 0
        while True:
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            connection: AsyncioConnection | None = None
            try:
                connection = await self._connect(lost)
                failures = 0
                if not first.done():
                    first.set_result(None)
                log.warning("connection to RabbitMQ lost: %s", await lost)
            except (BrokerUnavailable, ConfigurationError) as error:
                if not first.done():
                    first.set_exception(error)
                    return
                log.warning("RabbitMQ: %s", error.message)
            finally:
                self._forget("The connection to the message broker was lost.")
                if connection is not None and connection.is_open:
                    connection.close()
            await asyncio.sleep(_RECONNECT_S[min(failures, len(_RECONNECT_S) - 1)])
            failures += 1

    async def _connect(self, lost: asyncio.Future[str]) -> AsyncioConnection:
        ready: asyncio.Future[AsyncioConnection] = asyncio.get_running_loop().create_future()

        def failed(_: Any, why: Any) -> None:
            _settle(ready, BrokerUnavailable(f"RabbitMQ cannot be reached: {type(why).__name__}"))

        def closed(_: Any, why: Any) -> None:
            if not lost.done():
                lost.set_result(type(why).__name__)

        def opened(connection: AsyncioConnection) -> None:
            connection.add_on_connection_blocked_callback(self._on_blocked)
            connection.add_on_connection_unblocked_callback(self._on_unblocked)
            connection.channel(on_open_callback=lambda channel: self._on_channel(channel, connection, ready, lost))

        parameters = topology.parameters(self._settings.reach(self._region).amqp.get_secret_value())
        # No deadline of its own while blocked: publishes fail at once then, and the connection comes back to use.
        parameters.blocked_connection_timeout = None
        _Connection(parameters, opened, failed, closed)
        try:
            async with asyncio.timeout(10):
                return await ready
        except TimeoutError:
            raise BrokerUnavailable("RabbitMQ did not answer in time.") from None

    def _on_channel(self, channel: Channel, connection: AsyncioConnection, ready: Any, lost: Any) -> None:
        def confirming(_: Any) -> None:
            self._channel, self._blocked, self._next_tag = channel, False, 1
            _settle(ready, connection)

        def closed(_: Any, why: Any) -> None:
            if not lost.done():
                lost.set_result(type(why).__name__)

        channel.add_on_close_callback(closed)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, confirming)

    def _forget(self, why: str) -> None:
        self._channel, self._blocked = None, False
        self._fail_waiting(why)
        self._returned.clear()

    # --- what the broker says ---------------------------------------------------------------------------------

    def _on_confirm(self, frame: Any) -> None:
        verdict = frame.method
        nacked = isinstance(verdict, Basic.Nack)
        for tag in self._covered(verdict.delivery_tag, verdict.multiple):
            job_id, confirmed = self._unconfirmed.pop(tag)
            error: LingbotError | None = QueueFull() if nacked else None
            if job_id in self._returned:
                self._returned.discard(job_id)
                error = Unroutable()
            _settle(confirmed, error)

    def _covered(self, tag: int, multiple: bool) -> list[int]:
        if not multiple:
            return [tag] if tag in self._unconfirmed else []
        covered = []
        for known in self._unconfirmed:  # in order of tags, so the first one above ends it
            if known > tag:
                break
            covered.append(known)
        return covered

    def _on_return(self, _channel: Any, _method: Any, properties: Any, _body: bytes) -> None:
        self._returned.add(properties.message_id)

    def _on_blocked(self, _connection: Any, _frame: Any) -> None:
        self._blocked = True
        log.warning("RabbitMQ has an alarm and takes no messages")
        self._fail_waiting("The message broker is full.")

    def _on_unblocked(self, _connection: Any, _frame: Any) -> None:
        self._blocked = False
        log.warning("RabbitMQ takes messages again")

    def _fail_waiting(self, why: str) -> None:
        for _, confirmed in self._unconfirmed.values():
            _settle(confirmed, BrokerUnavailable(why))
        # While blocked the tags still count: their confirms come when the alarm is over, to nobody.
        self._unconfirmed.clear()


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
