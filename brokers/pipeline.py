"""Many commands in one round trip over asyncio.

As redis-py's own pipeline does, with the commands packed by hiredis in C: 4 µs for the call that creates a job instead
of 31, which is a tenth of what a whole submission costs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import hiredis
import redis.asyncio as aredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ResponseError


async def exchange(client: aredis.Redis, commands: Sequence[tuple[Any, ...]], *, timeout_s: float) -> list[Any]:
    """The replies in order; one that the server refused is a ResponseError among them. Raises connect.ERRORS.

    One deadline for all of it, so the client should have none of its own for each reply: those cost as much again.
    """
    pool = client.connection_pool
    async with asyncio.timeout(timeout_s):
        connection: AbstractConnection = await pool.get_connection()  # type: ignore[no-untyped-call]
        return await _on(connection, pool, commands)


async def _on(connection: AbstractConnection, pool: ConnectionPool, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    try:
        await connection.send_packed_command(b"".join(map(hiredis.pack_command, commands)))
        return [await _reply(connection) for _ in commands]
    except BaseException:
        # What is still to come would be read as the answer to somebody else's question.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as refusal:
        return refusal
