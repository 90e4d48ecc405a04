"""The network between our processes and their servers is cut, stalls, delays and truncates; an API dies in between."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from brokers.job import State
from tests.faults.checker import Checker
from tests.faults.conftest import Tell
from tests.faults.load import Work
from tests.faults.proxy import FaultProxy
from tests.faults.rig import Rig, Servers, until
from tests.faults.sizes import sizes

_CLIENTS = 10
_DELAY_S = 0.2


@pytest.fixture(scope="module")
def rig(shared: Servers) -> Iterator[Rig]:
    with Rig(shared, "network", proxied=True, accepted_grace_s=1.0) as rig:
        yield rig


def _cut(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.cut()
    time.sleep(chance.uniform(0.1, 0.5))


def _truncate(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.truncate(chance.randrange(1, 4000))  # somewhere within a frame
    time.sleep(0.5)


def _stall(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.stall()
    time.sleep(chance.choice([1.0, 2.0, 5.0]))  # shorter and longer than a lease
    proxy.heal()


def _delay(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.delay(_DELAY_S)
    time.sleep(chance.uniform(3, 4))
    proxy.heal()


def _refuse(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.refuse()
    time.sleep(chance.uniform(0.5, 2))
    proxy.heal()


_FAULTS: dict[str, Callable[[FaultProxy, random.Random], None]] = {
    "cut": _cut,
    "truncated": _truncate,
    "stalled": _stall,
    "delayed 200 ms": _delay,
    "refused": _refuse,
}


@pytest.mark.parametrize("server", ["redis", "rabbitmq"])
@sizes(short=1, long=6)
def test_a_bad_network_under_load(rig: Rig, tell: Tell, server: str, times: int) -> None:
    chance = random.Random(server)
    proxy = rig.proxies[server]
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for _ in range(times):
            for fault in _FAULTS.values():
                load.wait_flowing(_CLIENTS // 2, timeout_s=40)
                fault(proxy, chance)
                proxy.heal()
        journal = load.stop()
        verdict = checker.check(journal.readings)
    tell(
        f"connections to {server} {', '.join(_FAULTS)}; {times} times each",
        f"{verdict.jobs} jobs equal to the reference, {verdict.taken_over} takeovers, "
        f"{sum(reading.resumes for reading in journal.readings)} resumes; answers within "
        f"{journal.slowest_answer_s():.2f} s",
    )


@sizes(short=1, long=10)
def test_an_api_killed_between_record_and_publish(rig: Rig, tell: Tell, times: int) -> None:
    """The confirm never comes: the message is on its way when the process dies, and lost with the connection."""
    chance = random.Random(times)
    by_retry = 0
    with rig.checked() as (api_key, checker):
        works = [rig.work(chance, tokens=(40, 80)) for _ in range(times)]
        jobs: dict[str, Work] = {}
        for n, work in enumerate(works):
            known = {job.id for job in checker.jobs()}
            _die_while_publishing(rig, checker, api_key, work, f"key-{n}", known)
            if n % 2:  # its client comes back, with its key
                job_id = _retried(rig, api_key, work, f"key-{n}")
                by_retry += 1
            else:
                job_id = next(job.id for job in checker.jobs() if job.id not in known)
            jobs[job_id] = work
        verdict = checker.check_jobs(jobs)
        every = [job for job in checker.jobs() if job.state is not State.WITHDRAWN]
    tell(
        f"API process killed between record and publish, {times} times",
        f"{verdict.jobs} jobs ran once, {by_retry} of them for a retry with their Idempotency-Key",
    )
    assert len(every) == times


def _die_while_publishing(rig: Rig, checker: Checker, api_key: str, work: Work, key: str, known: set[str]) -> None:
    rig.to_rabbitmq.stall()
    try:
        posting = threading.Thread(target=_post_and_be_cut_off, args=(rig, api_key, work, key), daemon=True)
        posting.start()
        assert until(lambda: any(job.id not in known for job in checker.jobs()), timeout_s=1.0), "no record"
        rig.kill("api1")
        rig.to_rabbitmq.cut()
    finally:
        rig.to_rabbitmq.heal()
    posting.join(5)
    rig.spawn("api1")


def _post_and_be_cut_off(rig: Rig, api_key: str, work: Work, key: str) -> None:
    with rig.http(api_key) as http, pytest.raises(httpx.TransportError):
        http.post("/v1/jobs", json=work.body(), headers={"Idempotency-Key": key})


def _retried(rig: Rig, api_key: str, work: Work, key: str) -> str:
    found: list[str] = []

    def answered() -> bool:
        response = http.post("/v1/jobs", json=work.body(), headers={"Idempotency-Key": key})
        assert response.status_code in {200, 202, 409, 503}, response.text
        if response.is_success:
            found.append(response.json()["id"])
        return response.is_success

    with rig.http(api_key) as http:
        assert until(answered)
    return found[0]
