"""The message that Celery reads, and what of it anybody may see."""

from __future__ import annotations

import json

import msgspec
import pytest

from brokers import envelope
from brokers.job import Job, Kind, Lane, State


def job() -> Job:
    return Job(
        id="eu01m8q2p84wbv9gdkm3grfj7b0p",
        tenant="acme",
        kind=Kind.TEXT,
        model="m",
        lane=Lane.BATCH,
        home="eu",
        place="us",
        state=State.QUEUED,
        created_ms=1,
        deadline_ms=2,
        gen=3,
        prompt_tokens=4,
    )


def test_a_message_is_celerys_protocol_2_and_reads_back_whole() -> None:
    properties, body = envelope.encode(envelope.pack(job(), b"\x00sealed\xff"))
    args, kwargs, embed = json.loads(body)
    assert args == []
    assert set(embed) == {"callbacks", "errbacks", "chain", "chord"}
    assert properties.headers["task"] == "lingbot.text.v1"
    assert properties.headers["id"] == properties.correlation_id == job().id
    assert properties.delivery_mode == 2
    read = envelope.unpack(kwargs)
    assert read.to_job() == job()
    assert read.sealed_spec() == b"\x00sealed\xff"


def test_what_celery_shows_of_a_task_names_the_job_only() -> None:
    properties, _ = envelope.encode(envelope.pack(job(), b"sealed"))
    assert properties.headers["argsrepr"] == "()"
    assert properties.headers["kwargsrepr"] == "{'job': 'eu01m8q2p84wbv9gdkm3grfj7b0p', 'gen': 3}"


def test_a_message_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        envelope.unpack({"job": "x"})
