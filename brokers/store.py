"""The job record over asyncio: create, queue, withdraw, read, cancel, list.

Concurrent calls share one pipeline in flight: while it is away the next ones gather, so that a busy API sends
hundreds of commands in one round trip and an idle one sends each at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from brokers import calls, connect, names, pipeline
from brokers.errors import LingbotError, StoreUnavailable
from brokers.job import Job, State, home_of, id_time_ms
from brokers.settings import Settings

log = logging.getLogger(__name__)

_Place = tuple[float, str]
"""Where a job stands in its tenant's index: by time in ms, then by id."""


class Store:
    """The records of one region's home. Every call ends within `store_timeout_s` or raises StoreUnavailable."""

    def __init__(self, settings: Settings, region: str | None = None) -> None:
        self.region = region or settings.region
        self._settings = settings
        self._client = connect.asynchronous(settings, self.region)
        self._waiting: list[tuple[calls.Call, asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Check the store and load its functions. Raises StoreUnavailable or ConfigurationError."""
        await asyncio.to_thread(self._prepare)

    async def close(self) -> None:
        tasks = [task for task in (self._sender, self._preparing) if task]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def ping(self) -> None:
        await self.call(calls.Call(("PING",), lambda reply: reply))

    async def create(self, job: Job, sealed: bytes) -> bool:
        """False when there is such a record already."""
        return bool(await self.call(calls.create(job, sealed, self._keys(job), self._settings)))

    async def queued(self, job: Job) -> State | None:
        state: State | None = await self.call(calls.queued(job, self._keys(job), self._settings))
        return state

    async def withdraw(self, job: Job) -> bool:
        """True when the job will never run; False when it runs already."""
        return bool(await self.call(calls.withdraw(job, self._keys(job))))

    async def cancel(self, job: Job) -> State | None:
        """The state after the request; None when the record is gone."""
        state: State | None = await self.call(calls.cancel(job, self._keys(job)))
        return state

    async def durable(self, job: Job) -> bool:
        """Wait until what was written of a job is on its server's disk: a second at most where the append-only file is
        synced each second. False when that could not be seen in time, or the server cannot tell (Redis before 7.2)."""
        patience_s = self._settings.store_timeout_s
        # WAITAOF covers the writes of its own connection, and with this one all that came before it.
        key = names.durable(self.region, names.partition(job.id, self._settings.partitions))
        mark, wait = ("SET", key, 1, "EX", 60), ("WAITAOF", 1, 0, int(patience_s * 1000))
        try:
            server = await pipeline.server_of(self._client, key)
            marked, synced = await pipeline.exchange(server, (mark, wait), timeout_s=patience_s)
        except connect.ERRORS:
            return False
        return not isinstance(marked, Exception) and isinstance(synced, list) and synced[0] >= 1

    async def erase(self, job: Job) -> State | None:
        """End it if need be, and leave a tombstone; None when the record is gone already."""
        state: State | None = await self.call(calls.erase(job, self._keys(job), self._settings))
        return state

    async def get(self, job_id: str) -> Job | None:
        """The record; of an erased job the tombstone that is left of it."""
        if home_of(job_id) != self.region:
            return None
        part = names.partition(job_id, self._settings.partitions)
        job: Job | None = await self.call(calls.fetch(names.record(self.region, part, job_id)))
        return job

    async def list_jobs(self, tenant: str, limit: int, before: str | None = None) -> list[Job]:
        """A tenant's jobs, newest first, older than the job `before`; fewer than `limit` when there are no more."""
        kept: list[Job] = []
        place = (await self._listed_at(tenant, before), before) if before else (math.inf, "")
        more = True
        while more and len(kept) < limit:
            listed, more = await self._listed(tenant, limit + 1, place)
            if not listed:
                break
            kept += await self._first_kept([job_id for _, job_id in listed], limit - len(kept))
            place = listed[-1]
        return kept

    async def _listed(self, tenant: str, limit: int, before: _Place) -> tuple[list[_Place], bool]:
        """At least `limit` places of a tenant's index, newest first, if it has so many; and whether it has more."""
        parts = [names.partition_at(index) for index in range(self._settings.partitions)]
        bound = "+inf" if math.isinf(before[0]) else f"{before[0]:.0f}"
        pages: list[list[_Place]] = await asyncio.gather(
            *(self.call(_newest(names.tenant_jobs(self.region, part, tenant), bound, limit + 1)) for part in parts)
        )
        # A partition that gave all it was asked for may have more right behind the last one.
        ends = [page[-1] for page in pages if len(page) > limit]
        horizon = max(ends, default=(-math.inf, ""))
        found = sorted((place for page in pages for place in page if horizon <= place < before), reverse=True)
        return found, bool(ends)

    async def _first_kept(self, ids: list[str], limit: int) -> list[Job]:
        """The first `limit` of them that still have a record: an index outlives the records of what ended early."""
        kept: list[Job] = []
        while ids and len(kept) < limit:
            jobs = await asyncio.gather(*(self.get(job_id) for job_id in ids[:limit]))
            kept += [job for job in jobs if job and job.state is not State.ERASED]
            ids = ids[limit:]
        return kept[:limit]

    def stream_key(self, job: Job) -> str:
        return self._keys(job).stream

    async def usage(self, tenant: str, day: str) -> dict[str, int]:
        """A tenant's settled usage in one UTC day, `2026-11-30`: jobs, tokens, and jobs by state."""
        key = names.usage(self.region, tenant, day)
        counted = await self.call(calls.Call(("HGETALL", key), lambda reply: reply))
        return {name.decode(): int(count) for name, count in counted.items()}

    def live_keys(self) -> list[str]:
        """The sorted sets of this region's jobs that have not ended."""
        return [names.live(self.region, names.partition_at(index)) for index in range(self._settings.partitions)]

    async def call(self, call: calls.Call) -> Any:
        """Send one command in the next pipeline and read its reply."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return call.parse(await future)

    async def _send_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # one turn of the loop: what is ready to call now shares this round trip
            batch, self._waiting = self._waiting, []
            await self._send(batch)

    async def _send(self, batch: list[tuple[calls.Call, asyncio.Future[Any]]]) -> None:
        # A call waits for the pipeline in flight and for its own: half of its deadline each.
        commands = [call.command for call, _ in batch]
        try:
            replies = await pipeline.exchange(self._client, commands, timeout_s=self._settings.store_timeout_s / 2)
        except Exception as error:  # whatever it is, nobody may wait for ever for a reply
            if not isinstance(error, connect.ERRORS):
                log.exception("the store's pipeline failed")
            batch += self._waiting  # they have waited their half of the deadline
            self._waiting.clear()
            replies = [error] * len(batch)
        if any(map(connect.lacks_functions, replies)):
            self._prepare_again()
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                log.warning("the store refused a call: %s", reply)  # its words may name keys: for the log only
                future.set_exception(StoreUnavailable(f"The job store refused: {type(reply).__name__}"))
            else:
                future.set_result(reply)

    def _keys(self, job: Job) -> calls.Keys:
        return calls.keys(job, self._settings.partitions)

    def _prepare_again(self) -> None:
        """A server began anew while this process runs: it gets its functions, and callers a 503 until then."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._open_again())

    async def _open_again(self) -> None:
        try:
            await self.open()
        except LingbotError as error:
            log.error("the store cannot be prepared: %s", error.message)

    def _prepare(self) -> None:
        client = connect.blocking(self._settings, self.region, timeout_s=self._settings.store_timeout_s)
        with client:
            connect.prepare(client, self._settings)

    async def _listed_at(self, tenant: str, job_id: str) -> float:
        """Where a job stands in its tenant's index; one that was erased, where its id says."""
        part = names.partition(job_id, self._settings.partitions)
        score: float | None = await self.call(_score(names.tenant_jobs(self.region, part, tenant), job_id))
        return id_time_ms(job_id) if score is None else score


def _score(key: str, job_id: str) -> calls.Call:
    return calls.Call(("ZSCORE", key, job_id), lambda reply: reply)


def _newest(key: str, bound: str, limit: int) -> calls.Call:
    command = ("ZREVRANGEBYSCORE", key, bound, "-inf", "WITHSCORES", "LIMIT", 0, limit)
    return calls.Call(command, lambda reply: [(float(score), member.decode()) for member, score in reply])
