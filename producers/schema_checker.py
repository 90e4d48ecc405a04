"""Asks another process whether a JSON schema can be followed (schema_process.py), which may die of the question."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple, cast

from producers.schema_process import LENGTH

log = logging.getLogger(__name__)

_KEPT = 256  # verdicts
_READY_S = 20.0  # to start Python and load a library
_COSTLY = re.compile(r"fuel|too (big|large|complex|many)|limit|unable to determine", re.IGNORECASE)


class Verdict(NamedTuple):
    """Why a schema cannot be followed."""

    costly: bool  # it might be, but for what that costs
    words: str


_FATAL = Verdict(costly=True, words="it takes too long or too much memory to compile")


class SchemaChecker:
    """One process, started when it is first asked, and anew when it has died. One schema at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[str, Verdict | None] = OrderedDict()

    async def fault(self, schema: str) -> Verdict | None:
        """None when it can be followed."""
        async with self._turn:
            if schema not in self._verdicts:
                self._verdicts[schema] = await self._asked(schema)
                if len(self._verdicts) > _KEPT:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(schema)
            return self._verdicts[schema]

    async def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _asked(self, schema: str) -> Verdict | None:
        process = await self._running()
        try:
            wrong = await _exchange(process, schema)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._process = None
            log.warning("a JSON schema ended the process that compiled it: exit code %d", await process.wait())
            return _FATAL
        except BaseException:  # whoever asked is gone; the answer must not be taken for the next one's
            await self.close()
            raise
        return Verdict(bool(_COSTLY.search(wrong)), wrong) if wrong else None

    async def _running(self) -> Process:
        if self._process is None:
            command = (sys.executable, "-m", "producers.schema_process")
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
            try:
                await asyncio.wait_for(_answer(self._process), _READY_S)
            except BaseException:
                await self.close()
                raise
        return self._process


async def _exchange(process: Process, schema: str) -> str:
    sink, data = cast("asyncio.StreamWriter", process.stdin), schema.encode()
    sink.write(LENGTH.pack(len(data)) + data)
    await sink.drain()
    return await _answer(process)


async def _answer(process: Process) -> str:
    source = cast("asyncio.StreamReader", process.stdout)
    (length,) = LENGTH.unpack(await source.readexactly(LENGTH.size))
    return (await source.readexactly(length)).decode()
