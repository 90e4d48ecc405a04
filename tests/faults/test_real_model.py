"""Workers on a real model are killed in mid-token: what was delivered stays, and what follows is the model's own."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from random import Random

import pytest

from brokers.models import Registry
from tests.faults.conftest import Tell
from tests.faults.load import Load, Work
from tests.faults.report import percentile
from tests.faults.rig import Rig, Servers
from tests.faults.sizes import sizes

_MODEL = "smollm2-135m-instruct"
_CLIENTS = 4
_TOPICS = ("the sea", "a lamp", "an old bridge", "the winter", "a small town", "bread", "the moon", "a letter")


@pytest.fixture(scope="module")
def rig(shared: Servers) -> Iterator[Rig]:
    if not (shared.models_dir / _MODEL).is_dir():
        pytest.skip(f"{_MODEL} is not installed: make model")
    with Rig(shared, "real", model=_MODEL, threads=1) as rig:
        yield rig


@pytest.mark.model
@sizes(short=1, long=20)
def test_workers_on_a_real_model_killed_in_mid_token(rig: Rig, tell: Tell, times: int) -> None:
    from tests.faults.scoring import Judge

    chance = random.Random(times)
    kills = []
    with rig.checked() as (api_key, checker), Load(rig.base_urls, api_key, _work, _CLIENTS) as load:
        for n in range(times):
            load.wait_flowing(_CLIENTS // 2, timeout_s=60)
            time.sleep(chance.uniform(0.0, 1.0))
            victim = rig.workers[n % 2]
            kills.append(rig.kill(victim))
            rig.spawn(victim)
        journal = load.stop(timeout_s=100)
        verdict = checker.check(journal.readings)
        judge = Judge(Registry(rig.settings.models_dir).get(_MODEL))
        streams = [(reading.work, checker.stream(reading.job_id)) for reading in journal.readings]
        faults = [fault for work, stream in streams if stream for fault in judge.faults(work, stream)]
    gaps = journal.gaps_after(kills)
    tell(
        f"worker killed with -9 in mid-token, {times} times, {_MODEL}",
        f"{verdict.jobs} jobs, {verdict.tokens} tokens, {verdict.taken_over} takeovers; no delivered text changed, "
        f"each token is the model's own for its prefix; kill to next token p50 {percentile(gaps, 50):.1f} s, "
        f"p99 {percentile(gaps, 99):.1f} s",
    )
    assert not faults, faults[:10]
    assert verdict.taken_over > 0
    assert percentile(gaps, 99) <= 5.0


def _work(random: Random) -> Work:
    prompt = f"Write a short story about {random.choice(_TOPICS)} and {random.choice(_TOPICS)}. Once upon a time"
    return Work(prompt=prompt, seed=0, max_tokens=random.randrange(48, 120), model=_MODEL, greedy=True)
