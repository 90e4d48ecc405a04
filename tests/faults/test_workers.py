"""Workers die, freeze, are poisoned and replaced under load."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pika
import pytest

from brokers import names, topology
from brokers.job import State
from tests.faults.conftest import Tell
from tests.faults.report import percentile
from tests.faults.rig import Rig, Servers, until
from tests.faults.sizes import sizes

_CLIENTS = 10  # one worker alone can carry them
_BATCH = 32


@pytest.fixture(scope="module")
def rig(shared: Servers) -> Iterator[Rig]:
    # A short drain: what runs longer is handed over in mid-stream.
    with Rig(shared, "workers", apis=2, slots=_BATCH, drain_s=0.5) as rig:
        yield rig


@sizes(short=2, long=200)
def test_workers_killed_in_mid_token(rig: Rig, tell: Tell, times: int) -> None:
    chance = random.Random(times)
    kills = []
    # A job moves to the other worker, which is the next victim: a long one would rightly be given up at 20 deaths.
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS, tokens=(100, 500)) as load:
        for n in range(times):
            # All of them: three deaths without a token in between would be taken for poison, and rightly.
            load.wait_flowing(_CLIENTS, timeout_s=60)
            time.sleep(chance.uniform(0.0, 0.5))
            victim = rig.workers[n % 2]
            kills.append(rig.kill(victim))
            rig.spawn(victim)
        journal = load.stop()
        verdict = checker.check(journal.readings)
    gaps = journal.gaps_after(kills)
    p99 = percentile(gaps, 99)
    tell(
        f"worker killed with -9 in mid-token, {times} times, scripted engine",
        f"{verdict.jobs} jobs, {verdict.tokens} tokens, {verdict.taken_over} takeovers; 0 lost, 0 gaps, 0 repeats; "
        f"kill to next token p50 {percentile(gaps, 50):.1f} s, p99 {p99:.1f} s",
    )
    assert verdict.taken_over > 0
    assert p99 <= 5.0


@sizes(short=1, long=5)
def test_a_frozen_worker_is_replaced_and_then_fenced(rig: Rig, tell: Tell, times: int) -> None:
    fenced = 0
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for n in range(times):
            load.wait_flowing(_CLIENTS, timeout_s=30)
            victim = rig.workers[n % 2]
            before = rig.log(victim).count("'fenced'")
            frozen = time.monotonic()
            rig.freeze(victim)
            try:
                load.wait_taken_over(frozen)
            finally:
                rig.thaw(victim)
            time.sleep(2)
            fenced += rig.log(victim).count("'fenced'") - before
        verdict = checker.check(load.stop().readings)
    tell(
        f"worker stopped, replaced, continued, {times} times",
        f"{verdict.jobs} jobs, {verdict.taken_over} takeovers; the old worker was fenced {fenced} times, "
        "0 of its late chunks in a stream",
    )
    assert fenced > 0


@pytest.mark.parametrize(
    ("order", "when"),
    [
        pytest.param("!crash@0", "before", id="before", marks=pytest.mark.faults),
        pytest.param("!crash@20", "after", id="after"),
    ],
)
def test_poison_in_a_full_batch_ends_alone(rig: Rig, tell: Tell, order: str, when: str) -> None:
    chance = random.Random(order)
    works = [rig.work(chance, tokens=(200, 300)) for _ in range(_BATCH - 1)]
    works.insert(_BATCH // 2, rig.work(chance, tokens=(200, 300), orders=f"!slow@5 {order}"))
    with rig.checked() as (api_key, checker), rig.alone("w1"):
        before = _dead_letters(rig)
        with rig.load_of(api_key, works) as load:
            journal = load.finish(timeout_s=100)
        poison = next(reading for reading in journal.readings if order in reading.work.prompt)
        others = [reading for reading in journal.readings if reading is not poison]
        verdict = checker.check(others)
        checker.check([poison], state=State.FAILED)
        assert until(lambda: _dead_letters(rig) == before + 1)
    assert verdict.attempts == 1
    assert poison.error_codes == ["poison"]
    tell(
        f"a poison job in a batch of {_BATCH}, dying {when} its first token",
        f"the other {verdict.jobs} succeeded in one attempt each; the poison failed, its client was told, "
        "its message is dead-lettered",
    )


@pytest.mark.faults
def test_poison_that_takes_the_whole_worker_along_ends_alone(rig: Rig, tell: Tell) -> None:
    chance = random.Random("oom")
    works = [rig.work(chance, tokens=(200, 300)) for _ in range(_BATCH - 1)]
    works.insert(_BATCH // 2, rig.work(chance, tokens=(200, 300), orders="!slow@5 !oom@0"))
    deaths = 0
    with rig.checked() as (api_key, checker), rig.alone("w1"):
        with rig.load_of(api_key, works) as load:
            while not load.idle:
                if not rig.processes["w1"].alive:
                    deaths += 1
                    rig.spawn("w1")
                time.sleep(0.05)
            journal = load.finish(timeout_s=100)
        poison = next(reading for reading in journal.readings if "!oom" in reading.work.prompt)
        verdict = checker.check([reading for reading in journal.readings if reading is not poison])
        checker.check([poison], state=State.FAILED)
    assert poison.error_codes == ["poison"]
    assert deaths == 3
    tell(
        f"a poison job in a batch of {_BATCH} that kills the whole worker before its first token",
        f"the other {verdict.jobs} succeeded, in {verdict.attempts} attempts at most; the poison failed after {deaths} "
        "workers, its client was told",
    )


@sizes(short=1, long=5)
def test_rolling_restart_of_everything(rig: Rig, tell: Tell, times: int) -> None:
    with rig.checked() as (api_key, checker), rig.load(api_key, _CLIENTS) as load:
        for _ in range(times):
            for name in [*rig.workers, *rig.apis]:
                load.wait_flowing(_CLIENTS // 2, timeout_s=30)
                rig.processes[name].stop(grace_s=30)
                rig.spawn(name)
        journal = load.stop()
        verdict = checker.check(journal.readings)
    resumes = sum(reading.resumes for reading in journal.readings)
    tell(
        f"rolling restart of every worker and API process, {times} times",
        f"{verdict.jobs} jobs, {verdict.taken_over} handed over, {resumes} resumes; 0 failed, 0 repeated characters",
    )


def _dead_letters(rig: Rig) -> int:
    url = rig.settings.here.amqp.get_secret_value()
    with pika.BlockingConnection(topology.parameters(url)) as connection:
        queue = names.dead_queue(rig.settings.region)
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)
