"""The sweeper of one region: what was lost is found, what is due is ended or published again.

One leader per region at a time, by a lease in Redis; two for a moment do no harm, since every step is a checking
function and a second message of a job is dropped by its publish generation.

    python -m brokers.reconciler
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time

import msgspec

from brokers import calls, logs, management, names
from brokers.errors import BrokerUnavailable, LingbotError, StoreUnavailable
from brokers.job import Job, State
from brokers.publisher import Publisher
from brokers.seal import Sealer, first_generation
from brokers.settings import Settings, load
from brokers.store import Store
from brokers.webhooks import Webhooks

log = logging.getLogger(__name__)

_LEASE_MS = 5000
_AT_ONCE = 256  # jobs looked at together
_DUE_AT_ONCE = 500  # jobs of one partition in one sweep


class Reconciler:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = Store(settings)
        self._publisher = Publisher(settings)
        self._sealer = Sealer(settings)
        self._webhooks = Webhooks(settings, self._store, self._sealer)
        self._token = secrets.token_hex(8)
        self._leads = False
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._depths: dict[str, asyncio.Task[dict[str, int]]] = {}  # by place, of the sweep in hand
        self._patient_until: dict[str, float] = {}  # by partition (monotonic)

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep until asked to stop. Outages are waited out."""
        await self._open(stop)
        telling = asyncio.create_task(self._webhooks.run(lambda: self._leads))
        while not stop.is_set():
            try:
                if await self._lead():
                    await self.sweep()
            except LingbotError as error:
                log.warning("sweep: %s", error.message)
            await _pause(stop, self._settings.sweep_s)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await self._step_down()
        await self.close()

    async def open(self) -> None:
        await self._store.open()
        await self._publisher.open()

    async def close(self) -> None:
        await self._publisher.close()
        await self._store.close()

    async def sweep(self) -> int:
        """Look at every job that is due once; how many were published again, ended or settled. Raises StoreUnavailable
        and BrokerUnavailable; what can be done first is done first."""
        partitions = range(self._settings.partitions)
        due = await asyncio.gather(*(self._due(names.partition_at(index)) for index in partitions))
        jobs = [job_id for page in due for job_id in page or ()]
        self._depths.clear()
        done = sum(await asyncio.gather(*map(self._try, jobs)))
        if None in due:
            raise StoreUnavailable
        return done

    async def _try(self, job_id: str) -> bool:
        """One job's trouble is its own; an outage ends the sweep."""
        try:
            async with self._at_once:
                return await self._reconcile(job_id)
        except (StoreUnavailable, BrokerUnavailable):
            raise
        except LingbotError as error:
            log.error("job %s: %s", job_id, error.message)
            return False

    async def _open(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self.open()
                break
            except (StoreUnavailable, BrokerUnavailable) as error:
                log.warning("waiting to start: %s", error.message)
                await _pause(stop, 1.0)

    async def _due(self, part: str) -> list[str] | None:
        """None while the partition's server is away."""
        key = names.live(self._settings.region, part)
        now = time.monotonic()
        try:
            found: list[str] = await self._store.call(calls.due(key, _DUE_AT_ONCE))
        except StoreUnavailable:
            self._be_patient(part)
            return None
        return found if self._patient_until.get(part, 0.0) <= now else []

    def _be_patient(self, *parts: str) -> None:
        """When a store is back, owners have the time of a lease to say that they live: they could not before, and are
        not to be taken for dead."""
        until = time.monotonic() + self._settings.lease_ms / 1000
        self._patient_until |= dict.fromkeys(parts, until)

    async def _reconcile(self, job_id: str) -> bool:
        job = await self._store.get(job_id)
        if job is None:
            await self._drop(job_id)
            return False
        keys = calls.keys(job, self._settings.partitions)
        assume_lost = job.state is State.QUEUED and await self._no_message(job)
        can_publish = self._publisher.connected
        call = calls.reconcile(job_id, keys, self._settings, assume_lost=assume_lost, can_publish=can_publish)
        verdict = await self._store.call(call)
        match verdict:
            case calls.Publish():
                await self._publish_again(job, verdict)
            case calls.Settle():
                await self._settle(job, verdict)
            case calls.Ended():
                log.info("job %s ended as %s", job.id, verdict.state)
        return verdict is not None

    async def _settle(self, job: Job, settle: calls.Settle) -> None:
        """Usage goes on the tenant's account once: the account knows the job, should we die before the second call."""
        keep_ms = self._settings.usage_kept_s * 1000
        await self._store.call(calls.account(job.id, job.home, settle, keep_ms))
        await self._store.call(calls.settled(job.id, calls.keys(job, self._settings.partitions)))

    async def _publish_again(self, job: Job, verdict: calls.Publish) -> None:
        why = "due" if job.state is State.ACCEPTED else f"{job.state} with nobody at it"
        level = logging.INFO if job.start_ms and job.state is State.ACCEPTED else logging.WARNING
        log.log(level, "job %s was %s: published as generation %d", job.id, why, verdict.gen)
        sealed = self._sealer.reseal(first_generation(job), verdict.sealed, verdict.gen)
        await self._publisher.publish(msgspec.structs.replace(job, gen=verdict.gen), sealed)
        await self._store.queued(job)

    async def _drop(self, job_id: str) -> None:
        part = names.partition(job_id, self._settings.partitions)
        key = names.live(self._settings.region, part)
        await self._store.call(calls.Call(("ZREM", key, job_id), bool))

    async def _no_message(self, job: Job) -> bool:
        """True when the broker says that the job's queue holds nothing, delivered or not."""
        if job.place not in self._depths:  # one question a sweep, however many jobs wait
            self._depths[job.place] = asyncio.create_task(self._ask_depths(job.place))
        depths = await self._depths[job.place]
        return depths.get(names.queue(job.place, job.model, job.lane)) == 0

    async def _ask_depths(self, place: str) -> dict[str, int]:
        """Messages by queue; empty while nobody can tell, and then the jobs are looked at again later."""
        try:
            return await management.depths(self._settings, place)
        except BrokerUnavailable:
            return {}

    # --- leading ----------------------------------------------------------------------------------------------

    async def _lead(self) -> bool:
        try:
            self._leads = await self._take_lead()
        except StoreUnavailable:
            self._be_patient(*map(names.partition_at, range(self._settings.partitions)))
            raise
        return self._leads

    async def _take_lead(self) -> bool:
        key = names.leader(self._settings.region)
        taken = await self._store.call(calls.Call(("SET", key, self._token, "NX", "PX", _LEASE_MS), bool))
        if taken:
            return True
        holder = await self._store.call(calls.Call(("GET", key), lambda reply: reply))
        if holder != self._token.encode():
            return False
        await self._store.call(calls.Call(("PEXPIRE", key, _LEASE_MS), bool))
        return True

    async def _step_down(self) -> None:
        key = names.leader(self._settings.region)
        try:
            holder = await self._store.call(calls.Call(("GET", key), lambda reply: reply))
            if holder == self._token.encode():
                await self._store.call(calls.Call(("DEL", key), bool))
        except StoreUnavailable:
            pass  # the lease runs out


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


async def main() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await Reconciler(load()).run(stop)


if __name__ == "__main__":
    logs.configure(load())
    asyncio.run(main())
