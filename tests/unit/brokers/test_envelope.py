"""The message that Celery reads, and what of it anybody may see."""

from __future__ import annotations

import json
from typing import Any

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


def test_a_jobs_message_has_no_fault() -> None:
    properties, body = envelope.encode(envelope.pack(job(), b"sealed"))
    assert envelope.fault(properties.headers, body) is None
    assert envelope.fault(properties.headers, body.decode()) is None


def test_a_message_of_a_task_unknown_here_is_left_to_celery() -> None:
    assert envelope.fault({"task": "lingbot.text.v9", "id": "x"}, b"?") is None


@pytest.mark.parametrize("headers", [None, {}, {"task": None}, {"task": ["lingbot.text.v1"]}])
def test_a_message_that_names_no_task_is_no_jobs(headers: dict[str, Any] | None) -> None:
    _, body = envelope.encode(envelope.pack(job(), b"sealed"))
    assert envelope.fault(headers, body)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff", b"{not json", b"[]", b"{}", b"[[],{},{}]", b"[[],[1],{}]", b'[[],{"created_ms":"x"},{}]'],
)
def test_a_body_that_is_none_is_no_jobs(body: bytes) -> None:
    properties, _ = envelope.encode(envelope.pack(job(), b"sealed"))
    assert envelope.fault(properties.headers, body)


@pytest.mark.parametrize("odd", [{"id": "another"}, {"eta": "2026-01-01T00:00:00"}, {"expires": "soon"}])
def test_a_message_with_headers_that_no_publisher_writes_is_no_jobs(odd: dict[str, str]) -> None:
    properties, body = envelope.encode(envelope.pack(job(), b"sealed"))
    assert envelope.fault(properties.headers | odd, body)
