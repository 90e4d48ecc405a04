"""Tells tenants of their jobs' ends: signed as Standard Webhooks says, at least once, under an id that never changes.

    the job's end -> due in the store -> one try -> told, or due again later, ... or given up and kept as dead

The end of a job and its first due time are written in one call, so no end is forgotten. A try is taken with a lease:
a process that dies over it loses nothing but that time. What is told is the job as the API shows it, without its text,
as far as its record is kept.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from standardwebhooks.webhooks import Webhook as Signer

from brokers import calls, egress, names, views
from brokers.errors import LingbotError, SealBroken, StoreUnavailable
from brokers.job import Job, State, Webhook
from brokers.seal import Sealer
from brokers.settings import Settings
from brokers.store import Store

log = logging.getLogger(__name__)

_GONE = 410  # "no more of these", says Standard Webhooks
_LEASE_SPARE_MS = 5000
_JITTER = 0.1
_BUSY_S = 0.05
_PUT_OFF_S = 1.0

_random = random.SystemRandom()
_encoder = msgspec.json.Encoder()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a webhook."""

    type: str  # job.succeeded, job.failed, job.cancelled, job.expired
    timestamp: str  # when the job ended
    data: views.JobView


class DeadWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose end could not be told."""

    job: str
    object: str = "dead_webhook"
    tenant: str
    status: State
    tries: int
    error: str  # what came of the last try
    given_up_at: float  # unix seconds


class Webhooks:
    """Tells what is due in one region."""

    def __init__(self, settings: Settings, store: Store, sealer: Sealer) -> None:
        self._settings = settings
        self._store = store
        self._sealer = sealer
        self._egress = egress.Egress(
            timeout_s=settings.webhook_timeout_s, allow_loopback=settings.webhook_allow_loopback
        )
        self._trying: set[asyncio.Task[None]] = set()
        self._in_flight: Counter[str] = Counter()  # by tenant
        self._lease_ms = int(settings.webhook_timeout_s * 1000) + _LEASE_SPARE_MS

    async def run(self, leads: Callable[[], bool]) -> None:
        """Tell what is due while this process leads, until cancelled. A try in flight then is due again later."""
        try:
            while True:
                started = await self._start_due() if leads() else 0
                await asyncio.sleep(_BUSY_S if started else self._settings.sweep_s)
        finally:
            for trying in self._trying:
                trying.cancel()
            await asyncio.gather(*self._trying, return_exceptions=True)
            self._egress.close()

    async def _start_due(self) -> int:
        """Begin tries, as many as there is room for; how many."""
        room = self._settings.webhook_in_flight - len(self._trying)
        if room <= 0:
            return 0
        parts = _random.sample(range(self._settings.partitions), min(room, self._settings.partitions))
        try:
            due = await asyncio.gather(*(self._due(names.partition_at(part), room // len(parts)) for part in parts))
        except StoreUnavailable as error:
            log.warning("webhooks: %s", error.message)
            return 0
        for job_id in (job_id for page in due for job_id in page):
            trying = asyncio.create_task(self._tell(job_id))
            self._trying.add(trying)
            trying.add_done_callback(self._trying.discard)
        return sum(map(len, due))

    async def _due(self, part: str, limit: int) -> list[str]:
        key = names.webhooks(self._settings.region, part)
        found: list[str] = await self._store.call(calls.told_due(key, limit, self._lease_ms))
        return found

    async def _tell(self, job_id: str) -> None:
        try:
            await self._try(job_id)
        except StoreUnavailable as error:
            log.warning("webhook of job %s: %s", job_id, error.message)  # due again when the lease is over
        except Exception:
            log.exception("webhook of job %s", job_id)  # likewise

    async def _try(self, job_id: str) -> None:
        job = await self._store.get(job_id)
        if job is None or job.webhook is None:
            await self._forget(job_id)
            return
        if self._in_flight[job.tenant] >= self._settings.webhook_in_flight_each:
            await self._put_off(job)
            return
        self._in_flight[job.tenant] += 1
        try:
            await self._tell_now(job, job.webhook)
        finally:
            self._in_flight[job.tenant] -= 1

    async def _put_off(self, job: Job) -> None:
        """Its tenant has its share of the tries in flight. Later than others', so that those are not behind it."""
        key = calls.keys(job, self._settings.partitions).webhooks
        due_ms = int((time.time() + _PUT_OFF_S * (1 + _random.random())) * 1000)
        await self._store.call(calls.Call(("ZADD", key, "XX", due_ms, job.id), bool))

    async def _tell_now(self, job: Job, webhook: bytes) -> None:
        keys = calls.keys(job, self._settings.partitions)
        tries, _ = await self._store.call(calls.webhook_tries(keys.record))
        error, final = await self._send(job, webhook)
        retry_ms = None if final else self._pause_ms(tries)
        await self._store.call(calls.told(job, keys, _dead_key(self._settings, job.id), error, retry_ms))
        if error:
            then = "given up" if retry_ms is None else f"again in {retry_ms / 1000:.0f} s"
            log.warning("webhook of job %s: %s; %s", job.id, error, then)

    async def _send(self, job: Job, sealed: bytes) -> tuple[str, bool]:
        """What went wrong, empty when nothing did; and whether another try would be in vain."""
        try:
            webhook = self._sealer.open_webhook(job, sealed)
            body = _encoder.encode(_event(job, self._store.stream_key(job)))
            status = await self._egress.post(webhook.url, _headers(job, webhook, body), body)
        except LingbotError as error:
            return error.message, isinstance(error, SealBroken)
        if 200 <= status < 300:
            return "", False
        return f"HTTP status {status}", status == _GONE

    def _pause_ms(self, tries: int) -> int | None:
        pauses = self._settings.webhook_retries_s
        if tries >= len(pauses):
            return None
        return int(pauses[tries] * 1000 * (1 - _JITTER * _random.random()))

    async def _forget(self, job_id: str) -> None:
        key = names.webhooks(self._settings.region, names.partition(job_id, self._settings.partitions))
        await self._store.call(calls.Call(("ZREM", key, job_id), bool))


async def dead(settings: Settings, store: Store, limit: int) -> list[DeadWebhook]:
    """Those given up, the latest first."""
    parts = (names.partition_at(index) for index in range(settings.partitions))
    pages = await asyncio.gather(*(store.call(_latest(names.dead_webhooks(settings.region, p), limit)) for p in parts))
    latest = sorted((entry for page in pages for entry in page), reverse=True)[:limit]
    found = await asyncio.gather(*(_dead(settings, store, job_id, at_ms) for at_ms, job_id in latest))
    return [each for each in found if each]


async def replay(settings: Settings, store: Store, job_id: str) -> bool:
    """All tries again for one that was given up. False when there is no such one."""
    job = await store.get(job_id)
    if job is None:
        return False
    keys = calls.keys(job, settings.partitions)
    return bool(await store.call(calls.tell_again(job, keys, _dead_key(settings, job_id))))


async def _dead(settings: Settings, store: Store, job_id: str, at_ms: float) -> DeadWebhook | None:
    job = await store.get(job_id)
    if job is None:
        return None
    tries, error = await store.call(calls.webhook_tries(calls.keys(job, settings.partitions).record))
    return DeadWebhook(
        job=job_id, tenant=job.tenant, status=job.state, tries=tries, error=error, given_up_at=at_ms / 1000
    )


def _dead_key(settings: Settings, job_id: str) -> str:
    return names.dead_webhooks(settings.region, names.partition(job_id, settings.partitions))


def _latest(key: str, limit: int) -> calls.Call:
    command = ("ZREVRANGE", key, 0, limit - 1, "WITHSCORES")
    return calls.Call(command, lambda reply: [(float(at_ms), job_id.decode()) for job_id, at_ms in reply])


def _event(job: Job, stream_key: str) -> Event:
    ended = datetime.fromtimestamp((job.ended_ms or job.created_ms) / 1000, UTC)
    return Event(type=f"job.{job.state}", timestamp=ended.isoformat(), data=views.view(job, stream_key))


def _headers(job: Job, webhook: Webhook, body: bytes) -> list[tuple[str, str]]:
    now = datetime.now(UTC)
    headers = [
        ("Content-Type", "application/json"),
        ("User-Agent", "Lingbot-Webhooks/1"),
        ("webhook-id", job.id),
        ("webhook-timestamp", str(int(now.timestamp()))),
    ]
    if webhook.secret:
        headers.append(("webhook-signature", Signer(webhook.secret).sign(job.id, now, body.decode())))
    return headers
