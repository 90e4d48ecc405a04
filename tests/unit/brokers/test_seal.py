"""Sealed things open for whom they were sealed, and for nothing else."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec
import pytest

from brokers.errors import SealBroken, UnknownSealKey
from brokers.job import Job, Kind, Lane, Sampling, State, TextSpec, Webhook, new_job_id
from brokers.seal import Sealer
from brokers.settings import Settings

_SPEC = TextSpec((1, 2, 3), Sampling(max_tokens=5))
_WEBHOOK = Webhook("https://example.com/hook", "whsec_c2VjcmV0")


def _sealer(**masters: bytes) -> Sealer:
    keys: Any = {kid: base64.b64encode(master * 32).decode() for kid, master in masters.items()}
    return Sealer(Settings(seal_keys=keys))


@pytest.fixture
def job() -> Job:
    now_ms = int(time.time() * 1000)
    return Job(
        id=new_job_id("local"),
        tenant="acme",
        kind=Kind.TEXT,
        model="m",
        lane=Lane.STANDARD,
        home="local",
        place="local",
        state=State.ACCEPTED,
        created_ms=now_ms,
        deadline_ms=now_ms + 1000,
    )


def test_a_spec_and_a_webhook_come_back_as_they_were(job: Job) -> None:
    sealer = _sealer(a=b"1")
    assert sealer.open(job, sealer.seal(job, _SPEC)) == _SPEC
    sealed = sealer.seal_webhook(job, _WEBHOOK)
    assert b"example" not in sealed
    assert sealer.open_webhook(msgspec.structs.replace(job, gen=7, lane=Lane.BATCH), sealed) == _WEBHOOK


@pytest.mark.parametrize("change", [{"tenant": "other"}, {"home": "eu"}, {"id": new_job_id("local")}])
def test_nothing_opens_for_another_job(job: Job, change: dict[str, str]) -> None:
    sealer, other = _sealer(a=b"1"), msgspec.structs.replace(job, **change)
    for sealed, opened in (
        (sealer.seal(job, _SPEC), sealer.open),
        (sealer.seal_webhook(job, _WEBHOOK), sealer.open_webhook),
    ):
        with pytest.raises(SealBroken):
            opened(other, sealed)


def test_a_spec_is_bound_to_its_generation_and_is_no_webhook(job: Job) -> None:
    sealer = _sealer(a=b"1")
    sealed = sealer.seal(job, _SPEC)
    for wrong in (
        lambda: sealer.open(msgspec.structs.replace(job, gen=2), sealed),
        lambda: sealer.open_webhook(job, sealed),
    ):
        with pytest.raises(SealBroken):
            wrong()


def test_the_newest_key_seals_and_older_ones_open(job: Job) -> None:
    old, both = _sealer(a=b"1"), _sealer(a=b"1", b=b"2")
    assert both.open(job, old.seal(job, _SPEC)) == _SPEC
    with pytest.raises(UnknownSealKey):
        old.open(job, both.seal(job, _SPEC))
