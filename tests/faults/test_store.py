"""Redis dies, and comes back without its last seconds, under load."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.servers import Valkey
from tests.faults.conftest import Tell
from tests.faults.report import percentile
from tests.faults.rig import Rig, Servers, until
from tests.faults.sizes import sizes

_CLIENTS = 10
_LOST_S = 2.0
_DRAIN_S = 5.0


@pytest.fixture(scope="module")
def rig(shared: Servers) -> Iterator[Rig]:
    with Rig(shared, "stores", drain_s=_DRAIN_S) as rig:
        yield rig


@sizes(short=2, long=20)
def test_redis_killed_under_load(rig: Rig, tell: Tell, times: int) -> None:
    chance = random.Random(times)
    recovered = []
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for _ in range(times):
            load.wait_flowing(_CLIENTS, timeout_s=30)
            rig.servers.valkey.kill()
            time.sleep(chance.uniform(0.2, 2.0))
            rig.servers.valkey.start()
            recovered.append(load.wait_flowing(_CLIENTS, timeout_s=30))
        journal = load.stop()
        verdict = checker.check(journal.readings)
    tell(
        f"Redis killed with -9 and restarted, {times} times, under load",
        f"{verdict.jobs} jobs, {verdict.tokens} tokens, 0 lost; answers within {journal.slowest_answer_s():.2f} s; all "
        f"{_CLIENTS} readers had text again {percentile(recovered, 50):.1f} s (median) and at most "
        f"{max(recovered):.1f} s after it was back, {sum(r.resumes for r in journal.readings)} of them by a reconnect",
    )
    assert journal.slowest_answer_s() <= 1.5
    assert max(recovered) <= 10.0


@sizes(short=1, long=5)
def test_owners_keep_their_jobs_when_redis_is_away_longer_than_a_lease(rig: Rig, tell: Tell, times: int) -> None:
    """Nobody could renew a lease meanwhile: a worker that lives is not to be taken for dead, and no strike counted."""
    lease_s = rig.settings.lease_ms / 1000
    tokens = (600 * times, 600 * times + 80)  # all of them fit into one worker's cache, even the longest
    works = [rig.work(random.Random(n), tokens=tokens, orders="!slow@15") for n in range(_CLIENTS)]
    with rig.checked() as (api_key, checker), rig.load_of(api_key, works) as load:
        for _ in range(times):
            load.wait_flowing(_CLIENTS, timeout_s=30)
            rig.servers.valkey.kill()
            time.sleep(lease_s + 1.5)
            rig.servers.valkey.start()
        verdict = checker.check(load.finish(120).readings)
    tell(
        f"Redis away for {lease_s + 1.5:.1f} s, {times} times, with leases of {lease_s:.0f} s",
        f"{verdict.jobs} jobs, {verdict.taken_over} takeovers, {verdict.attempts} attempt each",
    )
    assert (verdict.taken_over, verdict.attempts) == (0, 1)


@pytest.mark.faults
def test_a_worker_that_is_stopped_while_redis_is_away_ends(rig: Rig, tell: Tell) -> None:
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        load.wait_flowing(_CLIENTS, timeout_s=30)
        rig.servers.valkey.kill()
        try:
            asked = time.monotonic()
            rig.processes["w1"].ask_to_stop()
            ended = until(lambda: not rig.processes["w1"].alive, timeout_s=_DRAIN_S + 25)
            took_s = time.monotonic() - asked
        finally:
            rig.servers.valkey.start()
        rig.spawn("w1")
        load.wait_flowing(_CLIENTS, timeout_s=30)
        verdict = checker.check(load.stop().readings)
    tell(
        f"worker asked to stop while Redis is away, drain deadline {_DRAIN_S:.0f} s",
        f"it ended after {took_s:.0f} s; {verdict.jobs} jobs, {verdict.taken_over} takeovers, 0 lost",
    )
    assert ended


@sizes(short=1, long=10)
def test_redis_comes_back_without_its_last_seconds(rig: Rig, tell: Tell, times: int) -> None:
    lost_bytes = 0
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS, tokens=(40, 600), patient=True) as load:
        for _ in range(times):
            load.wait_flowing(_CLIENTS // 2, timeout_s=60)
            lost_bytes += _lose(rig.servers.valkey, _LOST_S)
        journal = load.stop()
        verdict = checker.check(journal.readings)
    refusals = sum(len(reading.refusals) for reading in journal.readings)
    tell(
        f"Redis comes back without its last {_LOST_S:.0f} s, {times} times, under load",
        f"{verdict.jobs} jobs, 0 lost though {lost_bytes >> 10} KiB of the store were; "
        f"readers went on, {refusals} times after a refusal while the record was rebuilt",
    )


def _lose(valkey: Valkey, seconds: float) -> int:
    """Kill it and cut what it wrote in its last seconds from its append-only file; how many bytes."""
    log = _append_only_file(valkey)
    size = log.stat().st_size
    time.sleep(seconds)
    valkey.kill()
    lost = log.stat().st_size - size
    with log.open("r+b") as file:
        file.truncate(size)
    valkey.start()
    return lost


def _append_only_file(valkey: Valkey) -> Path:
    """The part that is written now: a rewrite starts the next one."""
    parts = (valkey.folder / "data" / "appendonlydir").glob("*.incr.aof")
    return max(parts, key=lambda part: part.stat().st_mtime)
