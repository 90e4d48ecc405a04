"""A Redis Cluster as one store, over asyncio and blocking.

redis-py's own cluster clients fail a whole pipeline when one server is away, connect while they are made, and retry
past the caller's deadline. Here a server that is away fails its own commands and no others, nothing is retried that
may have run, and one deadline holds for everything. Each server is reached by redis-py's plain client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import hiredis
import redis
import redis.asyncio as aredis
from redis.connection import Connection
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError, ResponseError

from brokers import pipeline
from brokers.address import Node
from brokers.slots import Command, Round, SlotMap

_HOPS = 5  # redirects one command may take
_LOOK_S = 0.4  # a server asked for the slot map has this long
_SLOTS = ("CLUSTER", "SLOTS")
_ERRORS = (RedisError, OSError, TimeoutError)


class AsyncCluster:
    """For one event loop; nothing is connected before the first command."""

    def __init__(self, seeds: Sequence[Node], make: Callable[[Node], aredis.Redis]) -> None:
        self._slots = SlotMap(seeds)
        self._make = make
        self._servers: dict[Node, aredis.Redis] = {}
        self._looking: asyncio.Task[None] | None = None

    async def exchange(self, commands: Sequence[Command], *, timeout_s: float) -> list[Any]:
        """The replies in order, errors among them. Raises ConnectionError when no server at all is known."""
        until = asyncio.get_running_loop().time() + timeout_s
        await self._know(timeout_s)
        rounds = Round(self._slots, commands)
        for _ in range(_HOPS):
            plan = rounds.plan()
            if not plan:
                break
            await asyncio.gather(*(self._ask(rounds, node, indexes, until) for node, indexes in plan.items()))
        self._look_if_due()
        return rounds.replies

    async def server_of(self, key: str) -> aredis.Redis:
        """The server that a key is on now. Raises ConnectionError."""
        self._look_if_due()
        await self._know(_LOOK_S * 2)
        return self._server(self._slots.of_key(key))

    def learn(self, server: aredis.Redis, error: Exception) -> None:
        for node, known in self._servers.items():
            if known is server:
                self._slots.learn(node, error)

    async def aclose(self) -> None:
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(server.aclose() for server in self._servers.values()))
        self._servers.clear()

    async def _ask(self, rounds: Round, node: Node, indexes: list[int], until: float) -> None:
        left_s = until - asyncio.get_running_loop().time()
        try:
            answers = await pipeline.exchange(self._server(node), rounds.packets(indexes), timeout_s=left_s)
        except _ERRORS as error:
            rounds.fail(node, indexes, error)
        else:
            rounds.take(node, indexes, answers)

    def _server(self, node: Node) -> aredis.Redis:
        if node not in self._servers:
            self._servers[node] = self._make(node)
        return self._servers[node]

    async def _know(self, timeout_s: float) -> None:
        if self._slots.empty:
            self._look_if_due()
            if self._looking:
                await asyncio.wait({self._looking}, timeout=timeout_s)

    def _look_if_due(self) -> None:
        """Ask how the Cluster stands, beside the commands that go on with what is known."""
        if self._slots.due and (self._looking is None or self._looking.done()):
            self._slots.looking()
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        for node in self._slots.candidates():
            try:
                (reply,) = await pipeline.exchange(self._server(node), [_SLOTS], timeout_s=_LOOK_S)
            except _ERRORS:
                continue
            if not isinstance(reply, Exception) and reply:
                self._slots.read(reply, node)
                return


class BlockingCluster:
    """For any number of threads; nothing is connected before the first command."""

    def __init__(self, seeds: Sequence[Node], make: Callable[[Node], redis.Redis]) -> None:
        self._slots = SlotMap(seeds)
        self._make = make
        self._servers: dict[Node, redis.Redis] = {}
        self._lock = threading.Lock()

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The replies in order, errors among them; each server is waited for as long as its client says."""
        self._look_if_due()
        rounds = Round(self._slots, commands)
        for _ in range(_HOPS):
            plan = rounds.plan()
            if not plan:
                break
            # To all of them first, so that they work at the same time.
            sent = [(node, indexes, self._send(rounds, node, indexes)) for node, indexes in plan.items()]
            for node, indexes, connection in sent:
                if connection:
                    self._receive(rounds, node, indexes, connection)
        return rounds.replies

    def primaries(self) -> list[redis.Redis]:
        """Raises ConnectionError when none is known."""
        self._look_if_due()
        if self._slots.empty:
            raise NotConnected("no server of the Cluster answers")
        return [self._server(node) for node in self._slots.primaries]

    def servers(self) -> list[redis.Redis]:
        """Primaries and replicas. Raises ConnectionError when none is known."""
        self.primaries()
        return [self._server(node) for node in self._slots.nodes]

    def close(self) -> None:
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, rounds: Round, node: Node, indexes: list[int]) -> Connection | None:
        """The connection on which the replies will come; None when the server is away."""
        pool = self._server(node).connection_pool
        connection: Connection | None = None
        try:
            connection = pool.get_connection()
            packed = b"".join(map(hiredis.pack_command, rounds.packets(indexes)))
            connection.send_packed_command([packed])  # type: ignore[no-untyped-call]
        except _ERRORS as error:
            if connection:
                connection.disconnect()  # type: ignore[no-untyped-call]
                pool.release(connection)
            rounds.fail(node, indexes, error)
            return None
        return connection

    def _receive(self, rounds: Round, node: Node, indexes: list[int], connection: Connection) -> None:
        pool = self._server(node).connection_pool
        try:
            answers = [_reply(connection) for _ in rounds.packets(indexes)]
        except _ERRORS as error:
            connection.disconnect()  # type: ignore[no-untyped-call]
            rounds.fail(node, indexes, error)
        else:
            rounds.take(node, indexes, answers)
        finally:
            pool.release(connection)

    def _server(self, node: Node) -> redis.Redis:
        with self._lock:
            if node not in self._servers:
                self._servers[node] = self._make(node)
            return self._servers[node]

    def _look_if_due(self) -> None:
        if not self._slots.due:
            return
        self._slots.looking()
        for node in self._slots.candidates():
            try:
                reply = self._server(node).execute_command(*_SLOTS)  # type: ignore[no-untyped-call]
            except _ERRORS:
                continue
            if reply:
                self._slots.read(reply, node)
                return


def _reply(connection: Connection) -> Any:
    try:
        return connection.read_response()
    except ResponseError as refusal:
        return refusal
