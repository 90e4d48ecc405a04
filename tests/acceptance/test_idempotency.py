"""Idempotency-Key: a request that comes again, or a hundred times at once, makes its jobs once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest

from brokers import calls, names
from brokers.job import Job, Kind, Lane, Sampling, State, TextSpec, new_job_id, nth_job_id
from brokers.seal import Sealer
from brokers.settings import Settings
from brokers.store import Store
from compose.servers import Valkey
from compose.servers.server import Server
from producers.idempotency import _digest  # the key as the API writes it
from tests.platform import Platform

_TENANT = "idempotent"


@pytest.fixture(scope="module")
def key(platform: Platform) -> str:
    return platform.new_key(_TENANT, {"submit", "read"})


@pytest.fixture(scope="module")
def http(platform: Platform, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=platform.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=20) as client:
        yield client


def _body(platform: Platform, **fields: Any) -> dict[str, Any]:
    return {"model": platform.model, "prompt": "hello", "max_tokens": 8, **fields}


def _post(http: httpx.Client, body: dict[str, Any], key: str, path: str = "/v1/jobs") -> httpx.Response:
    return http.post(path, json=body, headers={"Idempotency-Key": key})


def _ids(http: httpx.Client) -> set[str]:
    return {job["id"] for job in http.get("/v1/jobs", params={"limit": 100}).json()["data"]}


def test_the_same_request_again_gets_the_same_job(platform: Platform, http: httpx.Client) -> None:
    word = uuid4().hex
    first = _post(http, _body(platform), word)
    again = _post(http, dict(reversed(_body(platform).items())), word)  # the order of fields says nothing
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json()["id"] == first.json()["id"]
    assert "Idempotency-Replayed" not in first.headers
    assert again.headers["Idempotency-Replayed"] == "true"
    other_key = _post(http, _body(platform), word + "x")
    assert other_key.json()["id"] != first.json()["id"]


def test_another_request_under_the_same_key_is_refused(platform: Platform, http: httpx.Client) -> None:
    word = uuid4().hex
    assert _post(http, _body(platform), word).status_code == 202
    before = _ids(http)
    for path, body in (("/v1/jobs", _body(platform, max_tokens=9)), ("/v1/completions", _body(platform))):
        refused = _post(http, body, word, path)
        problem = refused.json().get("error", refused.json())
        assert (refused.status_code, problem["code"]) == (422, "idempotency_key_reused")
    assert _ids(http) == before


def test_keys_of_two_tenants_do_not_meet(platform: Platform, http: httpx.Client) -> None:
    word = uuid4().hex
    mine = _post(http, _body(platform), word).json()["id"]
    stranger = {"Authorization": f"Bearer {platform.new_key('otherone', {'submit'})}", "Idempotency-Key": word}
    theirs = httpx.post(f"{platform.base_url}/v1/jobs", json=_body(platform, max_tokens=2), headers=stranger)
    assert theirs.status_code == 202
    assert theirs.json()["id"] != mine


@pytest.mark.parametrize("bad", ["", "x" * 256, "tab\tkey", "ümlaut"])
def test_a_key_that_is_none_is_told(platform: Platform, http: httpx.Client, bad: str) -> None:
    headers = [(b"Idempotency-Key", bad.encode("latin-1"))]
    response = http.post("/v1/jobs", json=_body(platform), headers=headers)
    assert (response.status_code, response.json()["param"]) == (400, "Idempotency-Key")


async def test_a_hundred_posts_at_once_make_one_job_and_all_are_answered(platform: Platform) -> None:
    tenant = "hundred"
    headers = {
        "Authorization": f"Bearer {await asyncio.to_thread(platform.new_key, tenant, {'submit', 'read'})}",
        "Idempotency-Key": uuid4().hex,
    }
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=platform.base_url, headers=headers, timeout=20, limits=limits) as http:
        posts = (http.post("/v1/jobs", json=_body(platform)) for _ in range(100))
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {202}
        (job_id,) = {answer.json()["id"] for answer in answers}
        assert sum("Idempotency-Replayed" not in answer.headers for answer in answers) == 1
        assert [job["id"] for job in (await http.get("/v1/jobs")).json()["data"]] == [job_id]


async def test_choices_posted_at_once_are_made_once_each(platform: Platform) -> None:
    headers = {
        "Authorization": f"Bearer {await asyncio.to_thread(platform.new_key, 'choices', {'submit', 'read'})}",
        "Idempotency-Key": uuid4().hex,
    }
    body = {"model": platform.model, "messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 12}
    async with httpx.AsyncClient(base_url=platform.base_url, headers=headers, timeout=20) as http:
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        assert len((await http.get("/v1/jobs")).json()["data"]) == 3


def test_an_openai_answer_is_replayed_whole_and_as_a_stream(platform: Platform, http: httpx.Client) -> None:
    ask = {"model": platform.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
    word = uuid4().hex
    whole = _post(http, ask, word, "/v1/chat/completions")
    again = _post(http, ask, word, "/v1/chat/completions")
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.json() == whole.json()
    first, second = (_post(http, {**ask, "stream": True}, word + "s", "/v1/chat/completions") for _ in range(2))
    assert second.headers["Idempotency-Replayed"] == "true"
    assert _said(second) == _said(first) != ""
    assert second.text.rstrip().endswith("data: [DONE]")


def _said(response: httpx.Response) -> str:
    chunks = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_a_reader_with_a_key_that_hangs_up_finds_its_answer_when_it_returns(
    platform: Platform, http: httpx.Client, settings: Settings
) -> None:
    ask = {"model": platform.model, "messages": [{"role": "user", "content": "x !slow@5"}], "max_tokens": 100}
    headers = {"Idempotency-Key": uuid4().hex}
    with http.stream("POST", "/v1/chat/completions", json={**ask, "stream": True}, headers=headers) as response:
        next(response.iter_lines())
    time.sleep(settings.reader_grace_s + 1)
    again = http.post("/v1/chat/completions", json={**ask, "stream": True}, headers=headers)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.text.rstrip().endswith("data: [DONE]")


async def test_a_request_that_died_between_record_and_publish_is_answered_with_its_job(
    platform: Platform, http: httpx.Client, settings: Settings
) -> None:
    word, body = uuid4().hex, _body(platform, seed=5)
    job = await _die(settings, http, body, word, with_record=True)
    started = time.monotonic()
    answer = _post(http, body, word)
    assert time.monotonic() - started < 3
    assert (answer.status_code, answer.json()["id"]) == (202, job.id)
    assert answer.headers["Idempotency-Replayed"] == "true"
    assert _ended(http, job.id)["status"] == "succeeded"  # the reconciler published it


async def test_a_request_that_died_before_its_record_is_made_by_the_next_one(
    platform: Platform, http: httpx.Client, settings: Settings
) -> None:
    word, body = uuid4().hex, _body(platform, seed=6)
    await _die(settings, http, body, word, with_record=False)
    answer = _post(http, body, word)
    assert answer.status_code == 202
    assert "Idempotency-Replayed" not in answer.headers
    assert _ended(http, answer.json()["id"])["status"] == "succeeded"
    assert _post(http, body, word).json()["id"] == answer.json()["id"]


def test_a_key_of_an_erased_job_is_free_again(platform: Platform, http: httpx.Client) -> None:
    word = uuid4().hex
    first = _post(http, _body(platform), word).json()["id"]
    assert http.delete(f"/v1/jobs/{first}").status_code == 204
    assert _post(http, _body(platform), word).json()["id"] != first


@pytest.mark.parametrize("part", ["rabbitmq", "valkey"])
def test_a_key_that_was_answered_503_is_free_for_the_next_try(
    platform: Platform, http: httpx.Client, request: pytest.FixtureRequest, part: str
) -> None:
    server: Server = request.getfixturevalue(part)
    word, body = uuid4().hex, _body(platform, seed=8)
    before = _ids(http)
    group = os.getpgid(server.process.pid)
    os.killpg(group, signal.SIGSTOP)
    try:
        started = time.monotonic()
        refused = _post(http, body, word)
        assert time.monotonic() - started < 1.5
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
    finally:
        os.killpg(group, signal.SIGCONT)
    deadline = time.monotonic() + 15
    while (answer := _post(http, body, word)).status_code in {409, 503}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.status_code == 202
    assert _ended(http, answer.json()["id"])["status"] == "succeeded"
    assert _ids(http) == before | {answer.json()["id"]}


async def test_a_job_made_again_under_its_id_is_not_withdrawn_by_the_request_that_gave_it_up(
    settings: Settings, valkey: Valkey
) -> None:
    store = Store(settings)
    await store.open()
    try:
        first = _job(settings)
        again = msgspec.structs.replace(first, created_ms=first.created_ms + 2500)
        assert await store.create(again, b"sealed")
        assert not await store.create(first, b"sealed")
        assert await store.withdraw(first)
        kept = await store.get(first.id)
        assert kept is not None
        assert kept.state is State.ACCEPTED
        assert await store.withdraw(again)
    finally:
        await store.close()


async def test_a_request_that_died_with_half_of_its_jobs_made_gets_the_other_half(
    http: httpx.Client, platform: Platform, settings: Settings
) -> None:
    path, word = "/v1/completions", uuid4().hex
    body = {"model": platform.model, "prompt": "hello", "max_tokens": 8, "n": 2, "seed": 1}
    job = await _die(settings, http, body, word, with_record=True, path=path)
    answer = _post(http, body, word, path)
    assert answer.status_code == 200
    assert answer.headers["X-Lingbot-Jobs"].split(",") == [job.id, nth_job_id(job.id, 1)]
    assert len(answer.json()["choices"]) == 2


async def test_who_comes_while_another_request_is_at_it_is_told_when_to_come_again(
    http: httpx.Client, platform: Platform, settings: Settings
) -> None:
    word, body = uuid4().hex, _body(platform)
    await _die(settings, http, body, word, with_record=False, in_progress_ms=4000)
    started = time.monotonic()
    busy = _post(http, body, word)
    assert time.monotonic() - started < 3
    assert (busy.status_code, busy.json()["code"]) == (409, "idempotency_in_progress")
    assert busy.headers["Retry-After"] == "1"
    assert _post(http, body, word).status_code == 202


async def _die(
    settings: Settings,
    http: httpx.Client,
    body: dict[str, Any],
    word: str,
    *,
    with_record: bool,
    path: str = "/v1/jobs",
    in_progress_ms: int = 1000,
) -> Job:
    """What a process leaves behind that was killed in mid-request: the key, and perhaps the record of the first job."""
    probe = uuid4().hex
    assert _post(http, body, probe, path).is_success  # tells how the API digests this body
    store = Store(settings)
    try:
        known = _key_name(settings, probe)
        digest = await store.call(calls.Call(("HGET", known, "body"), bytes.decode))
        job = _job(settings)
        assert (
            await store.call(calls.idempotent(_key_name(settings, word), digest, job.id, in_progress_ms, 60_000))
            is None
        )
        if with_record:
            spec = TextSpec(tuple(b"hello"), Sampling(max_tokens=8, seed=1))
            assert await store.create(job, Sealer(settings).seal(job, spec))
        return job
    finally:
        await store.close()


def _job(settings: Settings) -> Job:
    now_ms = int(time.time() * 1000)
    return Job(
        id=new_job_id(settings.region),
        tenant=_TENANT,
        kind=Kind.TEXT,
        model="scripted",
        lane=Lane.STANDARD,
        home=settings.region,
        place=settings.region,
        state=State.ACCEPTED,
        created_ms=now_ms,
        deadline_ms=now_ms + 60_000,
        prompt_tokens=5,
    )


def _key_name(settings: Settings, word: str) -> str:
    digest = _digest(f"{_TENANT}\0{word}".encode())
    return names.idempotency(settings.region, names.partition(digest, settings.partitions), _TENANT, digest)


def _ended(http: httpx.Client, job_id: str, timeout_s: float = 15) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        job: dict[str, Any] = http.get(f"/v1/jobs/{job_id}").json()
        if job["status"] in {"succeeded", "failed", "cancelled", "expired"}:
            return job
        time.sleep(0.05)
    raise AssertionError(f"the job is still {job['status']}")
