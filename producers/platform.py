"""The parts behind the routes, opened once per process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, NamedTuple

from starlette.requests import Request

from brokers.chunk_reader import ChunkReader
from brokers.errors import JobNotFound, Unavailable
from brokers.job import Job, State, home_of
from brokers.keys import KeyStore, Principal
from brokers.models import Registry
from brokers.publisher import Publisher
from brokers.seal import Sealer
from brokers.settings import Settings
from brokers.store import Store
from producers.metrics import Metrics
from producers.schema_checker import SchemaChecker

log = logging.getLogger(__name__)

_OPEN_S = 2.0
_REOPEN_S = 0.5


class Home(NamedTuple):
    """Where a job's record and stream live."""

    store: Store
    reader: ChunkReader


class Platform:
    """Settings and open connections. One per process; one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.registry = Registry(settings.models_dir)
        self.sealer = Sealer(settings)
        self.store = Store(settings)
        self.publisher = Publisher(settings)
        self.keys = KeyStore(settings, self.store)
        self.schemas = SchemaChecker()
        self.closing: asyncio.Future[None] | None = None  # done once this process is told to go
        self._homes = {settings.region: Home(self.store, ChunkReader(settings))}
        self._moving = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Come up even when a part is away: then /readyz says so, and requests get 503 until it is back."""
        self.closing = asyncio.get_running_loop().create_future()
        await self._homes[self.settings.region].reader.open()
        for part in (self.store, self.publisher):
            await self._open(part)

    async def close(self) -> None:
        self.say_goodbye()
        await self._finish_background()
        await self.schemas.close()
        await self.publisher.close()
        for home in self._homes.values():
            await home.reader.close()
            await home.store.close()

    def say_goodbye(self) -> None:
        """Let open streams and waiting requests end: this process is about to."""
        if self.closing and not self.closing.done():
            self.closing.set_result(None)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the requests. At the end of the process it gets one store deadline to finish."""
        self._start(work)

    async def home(self, job_id: str) -> Home:
        """The home a job id names. Raises JobNotFound for what is no id, or names no region we know."""
        region = home_of(job_id)
        if region is None or region not in self.settings.regions:
            raise JobNotFound
        async with self._moving:
            if region not in self._homes:
                self._homes[region] = await self._open_home(region)
        return self._homes[region]

    async def job(self, principal: Principal, job_id: str) -> Job:
        """A job of this tenant's. Raises JobNotFound, for another tenant's too."""
        home = await self.home(job_id)
        job = await home.store.get(job_id)
        if job is None or job.tenant != principal.tenant or job.state is State.ERASED:
            raise JobNotFound
        return job

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _finish_background(self) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=self.settings.store_timeout_s)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _open_home(self, region: str) -> Home:
        home = Home(Store(self.settings, region), ChunkReader(self.settings, region))
        await home.reader.open()
        return home

    async def _open(self, part: Store | Publisher) -> None:
        """Open a part, and go on without it when that takes long. Raises ConfigurationError."""
        opening = self._start(self._open_at_last(part))
        await asyncio.wait({opening}, timeout=_OPEN_S)
        if opening.done():
            opening.result()

    async def _open_at_last(self, part: Store | Publisher) -> None:
        while True:
            try:
                await part.open()
            except Unavailable as error:
                log.warning("%s is not there yet: %s", type(part).__name__, error.message)
                await asyncio.sleep(_REOPEN_S)
            else:
                return


def platform_of(request: Request) -> Platform:
    platform: Platform = request.scope["platform"]
    return platform
