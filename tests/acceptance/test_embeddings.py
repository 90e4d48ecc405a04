"""Embeddings end to end: over OpenAI's route with their client, and as jobs; what is refused, and what survives."""

from __future__ import annotations

import base64
import json
import shutil
import time
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from httpx_sse import connect_sse
from openai import OpenAI
from tokenizers import Tokenizer

from brokers import names, topology
from brokers.job import Lane
from brokers.models import Registry
from brokers.settings import Settings
from compose import commands, probes
from compose.servers import Process
from tests.acceptance.test_command_line import Shell
from tests.acceptance.test_webhooks import Receiver, receiver
from tests.platform import Platform
from workers.engine.scripted_encoder import DIMENSIONS, scripted_vector
from workers.weights.scripted import byte_tokenizer, create_scripted_embedder

__all__ = ["receiver"]

MODEL = "embedder"
_READY_S = 45.0
_TEXTS = ["the sea", "a lamp in the window", "für x", "😀"]


def worker_process(state: Path, settings: Settings, name: str) -> Process:
    return Process(
        name,
        commands.worker(settings, [MODEL], name=name),
        env=commands.environment(state / "lingbot.toml"),
        log=state / "logs" / f"{name}.log",
        pid_file=state / "run" / f"{name}.pid",
    )


def wait_until_it_consumes(process: Process, settings: Settings) -> None:
    deadline = time.monotonic() + _READY_S
    while not probes.consumed(settings, names.queue(settings.region, MODEL, Lane.STANDARD)):
        assert process.alive, process.tail(40)
        assert time.monotonic() < deadline, process.tail(40)
        time.sleep(0.05)


def wait_until_it_is_listed(platform: Platform) -> None:
    """The API looks into the origin every two seconds."""
    deadline = time.monotonic() + _READY_S
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    while httpx.get(f"{platform.base_url}/v1/models/{MODEL}", headers=headers).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def worker(state: Path, settings: Settings, platform: Platform) -> Iterator[Process]:
    create_scripted_embedder(settings.models_dir, MODEL, {"directives": True})
    topology.declare(settings, [model.card.name for model in Registry(settings.models_dir).all()])
    process = worker_process(state, settings, "embedding")
    process.spawn()
    try:
        wait_until_it_consumes(process, settings)
        wait_until_it_is_listed(platform)
        yield process
    finally:
        process.stop(grace_s=10)
        shutil.rmtree(settings.models_dir / MODEL)  # the platform outlives this module


@pytest.fixture
def client(platform: Platform, worker: Process) -> OpenAI:
    return OpenAI(base_url=f"{platform.base_url}/v1", api_key=platform.api_key, max_retries=0, timeout=60)


@pytest.fixture
def http(platform: Platform, worker: Process) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=60) as http:
        yield http


@lru_cache
def _tokenizer() -> Tokenizer:
    return byte_tokenizer()


def ids(text: str) -> list[int]:
    return _tokenizer().encode(text).ids


def expected(text: str, kept: int = 0) -> list[float]:
    return array("f", scripted_vector(tuple(ids(text)), kept)).tolist()


def close(found: list[float], wanted: list[float]) -> bool:
    return found == pytest.approx(wanted, abs=1e-6)


def submit(http: httpx.Client, texts: Any, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/jobs", json={"model": MODEL, "input": texts, **fields})
    assert response.status_code == 202, response.text
    return response.json()  # type: ignore[no-any-return]


def until(http: httpx.Client, job: dict[str, Any], wanted: Any, timeout_s: float = 30) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        shown: dict[str, Any] = http.get(job["urls"]["self"]).json()
        if wanted(shown):
            return shown
        time.sleep(0.02)
    raise AssertionError(f"the job stands at {shown['position']} and is {shown['status']}")


def ended(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    return until(http, job, lambda shown: shown["status"] in {"succeeded", "failed", "cancelled", "expired"})


# --- OpenAI's route -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [_TEXTS, [ids(text) for text in _TEXTS]], ids=["texts", "ids"])
def test_inputs_are_embedded_in_their_order(client: OpenAI, given: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=given)  # the client asks for base64 and decodes it
    assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
    for entry, text in zip(answer.data, _TEXTS, strict=True):
        assert close(entry.embedding, expected(text))
    tokens = sum(len(ids(text)) for text in _TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", MODEL, "embedding")


@pytest.mark.parametrize("given", ["the sea", ids("the sea")], ids=["text", "ids"])
def test_one_input_needs_no_list(client: OpenAI, given: Any) -> None:
    (entry,) = client.embeddings.create(model=MODEL, input=given, encoding_format="float").data
    assert close(entry.embedding, expected("the sea"))


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": "the sea", "encoding_format": "base64", "user": "somebody"}
    answer = http.post("/v1/embeddings", json=body).json()
    assert set(answer) == {"object", "data", "model", "usage"}
    assert base64.b64decode(answer["data"][0]["embedding"]) == scripted_vector(tuple(ids("the sea")))
    floats = http.post("/v1/embeddings", json={"model": MODEL, "input": "the sea"}).json()["data"][0]["embedding"]
    assert array("f", floats).tobytes() == scripted_vector(tuple(ids("the sea")))


def test_fewer_dimensions_are_a_cut_of_length_one(client: OpenAI) -> None:
    (entry,) = client.embeddings.create(model=MODEL, input="the sea", dimensions=5).data
    assert close(entry.embedding, expected("the sea", 5))
    assert sum(number * number for number in entry.embedding) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ""}, "empty_prompt", "input[0]"),
        ({"input": []}, "empty_prompt", "input"),
        ({"input": ["a", ""]}, "empty_prompt", "input[1]"),
        ({"input": [[1, 2], []]}, "empty_prompt", "input[1]"),
        ({"input": ["a", [1]]}, "invalid_parameter", "input"),
        ({"input": ["a", 1]}, "invalid_parameter", "input"),
        ({"input": ["a"] * 2049}, "invalid_parameter", "input"),
        ({"input": ["a", "b" * 513]}, "context_exceeded", "input[1]"),
        ({"input": ["b" * 500] * 700}, "context_exceeded", "input"),
        ({"input": [1, 100_000]}, "invalid_parameter", "input[0]"),
        ({"input": "a\0b"}, "invalid_text", "input[0]"),
        ({"input": {"text": "a"}}, "invalid_parameter", "input"),
        ({"dimensions": 0}, "invalid_parameter", "dimensions"),
        ({"dimensions": DIMENSIONS + 1}, "invalid_parameter", "dimensions"),
        ({"encoding_format": "int8"}, "invalid_parameter", "encoding_format"),
        ({"truncate": True}, "unknown_field", "truncate"),
        ({"model": "scripted"}, "unsupported_model", None),
    ],
)
def test_what_is_not_taken_is_refused_by_name(client: OpenAI, fields: Any, code: str, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body={"model": MODEL, "input": "a", **fields}, cast_to=dict)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"


def test_an_input_that_fails_fails_the_request(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.embeddings.create(model=MODEL, input=["fine", "not so !raise@0"])
    assert caught.value.code == "generation_failed"


def test_the_model_says_what_it_is(client: OpenAI) -> None:
    model = client.models.retrieve(MODEL)
    assert model.model_extra is not None
    assert (model.model_extra["kind"], model.model_extra["dimensions"]) == ("embedding", DIMENSIONS)


def test_an_idempotency_key_makes_one_job(http: httpx.Client) -> None:
    headers, body = {"Idempotency-Key": "embed-once"}, {"model": MODEL, "input": "once"}
    first, second = (http.post("/v1/embeddings", json=body, headers=headers) for _ in range(2))
    assert first.headers["X-Lingbot-Jobs"] == second.headers["X-Lingbot-Jobs"]
    assert second.headers["Idempotency-Replayed"] == "true"
    assert first.json() == second.json()


# --- jobs ---------------------------------------------------------------------------------------------------------


def test_a_job_is_waited_for_and_read_again(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": _TEXTS, "dimensions": 4, "metadata": {"for": "tests"}}
    response = http.post("/v1/jobs?encoding_format=base64", json=body, headers={"Prefer": "wait=20"})
    job = response.json()
    assert (response.status_code, job["status"], job["kind"], job["position"]) == (200, "succeeded", "embedding", 4)
    wanted = [scripted_vector(tuple(ids(text)), 4) for text in _TEXTS]
    assert [base64.b64decode(each) for each in job["result"]["embeddings"]] == wanted
    tokens = sum(len(ids(text)) for text in _TEXTS)
    assert job["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0}
    again = http.get(job["urls"]["self"]).json()
    assert [array("f", numbers).tobytes() for numbers in again["result"]["embeddings"]] == wanted
    assert "text" not in again["result"]
    assert http.get(job["urls"]["self"], params={"encoding_format": "hex"}).status_code == 400


def test_a_stream_is_read_on_after_any_input(http: httpx.Client) -> None:
    texts = [f"input {n}" for n in range(40)]
    job = ended(http, submit(http, texts))
    for after in (0, 1, 17, 39, 40):
        url = f"{job['urls']['events']}?after={after}&encoding_format=base64"
        with connect_sse(http, "GET", url) as source:
            events = list(source.iter_sse())
        brought = [event for event in events if event.event == "embedding"]
        vectors = [base64.b64decode(each) for event in brought for each in event.json()["embeddings"]]
        assert vectors == [scripted_vector(tuple(ids(text))) for text in texts[after:]]
        assert events[-1].event == "end"
        assert (events[-1].json()["pos"], events[-1].json()["finish_reason"]) == (40, "stop")


def test_the_stream_is_read_from_redis_by_the_documented_format(http: httpx.Client, settings: Settings) -> None:
    texts = [f"input {n}" for n in range(30)]
    job = ended(http, submit(http, texts))
    vectors, pos = b"", 0
    with redis.Redis.from_url(settings.here.redis.get_secret_value(), socket_timeout=15) as store:
        for entry_id, fields in store.xrange(job["stream"]["key"]):
            at, n = (int(part) for part in entry_id.decode().split("-"))
            if n == 0:
                assert int(fields[b"p"]) == pos
                assert len(fields[b"v"]) == (at - pos) * DIMENSIONS * 4
                vectors, pos = vectors + fields[b"v"], at
    assert vectors == b"".join(scripted_vector(tuple(ids(text))) for text in texts)
    assert json.loads(fields[b"d"])["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("route", "fields", "code"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "unsupported_model"),
        ("/v1/completions", {"prompt": "hi"}, "unsupported_model"),
        ("/v1/jobs", {"prompt": "hi"}, "unsupported_model"),
        ("/v1/jobs", {"input": "hi", "temperature": 0}, "unsupported_model"),
        ("/v1/jobs", {"input": "hi", "kind": "text"}, "unsupported_model"),
        ("/v1/jobs", {"model": "scripted", "input": "hi"}, "unsupported_model"),
        ("/v1/jobs", {"model": "scripted", "prompt": "hi", "dimensions": 3}, "unsupported_model"),
        ("/v1/jobs", {}, "missing_field"),
    ],
)
def test_each_kind_of_model_refuses_what_is_for_the_other(
    http: httpx.Client, route: str, fields: dict[str, Any], code: str
) -> None:
    response = http.post(route, json={"model": MODEL, **fields})
    problem = response.json()
    assert (response.status_code, problem.get("error", problem)["code"]) == (400, code)


def test_a_job_is_cancelled_between_two_inputs(http: httpx.Client) -> None:
    job = submit(http, [f"{n} !slow@100" for n in range(400)])
    until(http, job, lambda shown: shown["position"] > 0)
    http.post(job["urls"]["cancel"])
    over = ended(http, job)
    assert over["status"] == "cancelled"
    assert 0 < len(over["result"]["embeddings"]) == over["position"] < 400


def test_a_job_past_its_deadline_expires(http: httpx.Client) -> None:
    job = submit(http, [f"{n} !slow@100" for n in range(900)], expires_in=1)
    assert ended(http, job)["status"] == "expired"


def test_an_input_that_kills_its_engine_ends_its_own_job_only(http: httpx.Client) -> None:
    neighbours = [submit(http, [f"{k} {n} !slow@30" for n in range(60)]) for k in range(3)]
    poison = submit(http, ["fine", "not so !crash@0"])
    over = ended(http, poison)
    assert (over["status"], over["error"]["code"]) == ("failed", "poison")
    for k, neighbour in enumerate(neighbours):
        job = ended(http, neighbour)
        assert job["status"] == "succeeded", job
        for n, numbers in enumerate(job["result"]["embeddings"]):
            assert close(numbers, expected(f"{k} {n} !slow@30"))


def test_a_job_that_was_given_up_is_replayed(http: httpx.Client, platform: Platform) -> None:
    poison = submit(http, ["fine", "not so !crash@0"], dimensions=3)
    assert ended(http, poison)["error"]["code"] == "poison"
    admin = {"Authorization": f"Bearer {platform.admin_key}"}
    deadline = time.monotonic() + 10
    while (answer := http.post(f"/v1/dead/{poison['id']}/replay", headers=admin)).status_code == 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = answer.json()
    assert (answer.status_code, again["kind"], again["model"]) == (202, "embedding", MODEL)
    http.post(again["urls"]["cancel"])
    ended(http, again)


def test_the_end_of_an_embedding_job_is_told(http: httpx.Client, receiver: Receiver) -> None:
    job = submit(http, ["a", "b"], webhook={"url": receiver.url("/vectors")})
    (delivery,) = receiver.wait("/vectors", 1)
    told = json.loads(delivery.body)
    assert (told["type"], told["data"]["id"], told["data"]["kind"]) == ("job.succeeded", job["id"], "embedding")
    assert "result" not in told["data"]


def test_a_small_request_does_not_wait_for_a_large_one(client: OpenAI, http: httpx.Client) -> None:
    large = submit(http, [f"{n} !slow@50" for n in range(2000)], lane="interactive")
    until(http, large, lambda shown: shown["position"] > 0)
    began = time.monotonic()
    client.embeddings.create(model=MODEL, input="quick")
    assert time.monotonic() - began < 2
    assert http.get(large["urls"]["self"]).json()["status"] == "running"
    http.post(large["urls"]["cancel"])
    ended(http, large)


def test_a_worker_killed_in_the_middle_is_followed_by_another(
    http: httpx.Client, state: Path, settings: Settings, worker: Process
) -> None:
    texts = [f"{n} !slow@60" for n in range(500)]
    job = submit(http, texts)
    until(http, job, lambda shown: shown["position"] >= 40)
    second = worker_process(state, settings, "embedding2")
    second.spawn()
    try:
        worker.kill()
        events = []
        with connect_sse(http, "GET", f"{job['urls']['events']}?encoding_format=base64") as source:
            events = list(source.iter_sse())
        brought = [event.json() for event in events if event.event == "embedding"]
        assert [each["start"] for each in brought] == [0, *(each["pos"] for each in brought[:-1])]
        vectors = [base64.b64decode(vector) for each in brought for vector in each["embeddings"]]
        assert vectors == [scripted_vector(tuple(ids(text))) for text in texts]
        taken = [each.json() for each in events if each.event == "progress" and each.json()["kind"] == "taken_over"]
        assert taken
        assert taken[0]["pos"] >= 40  # nothing that was out is computed again
        shown = ended(http, job)
        assert (shown["status"], shown["attempt"]) == ("succeeded", 1 + len(taken))
    finally:
        second.stop(grace_s=10)
        worker.spawn()
        wait_until_it_consumes(worker, settings)


# --- the command line ---------------------------------------------------------------------------------------------


def test_texts_on_the_command_line_become_lines_of_json(platform: Platform, worker: Process, tmp_path: Path) -> None:
    lingbot = Shell(platform, tmp_path)
    done = lingbot("embed", "--model", MODEL, "--dimensions", "4", "the sea", "a lamp")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert [line["embedding"] for line in lines] == [pytest.approx(expected(t, 4)) for t in ("the sea", "a lamp")]
    assert "2 embeddings" in done.stderr
    piped = lingbot("embed", "--dimensions", "4", "--detach", stdin="the sea\n\na lamp\n")
    tailed = lingbot("tail", piped.stdout.strip())
    assert tailed.stdout == done.stdout


def test_a_prompt_goes_to_a_model_that_writes(platform: Platform, worker: Process, tmp_path: Path) -> None:
    lingbot = Shell(platform, tmp_path)
    assert MODEL in lingbot("models", "list").stdout
    refused = lingbot("submit", "--model", MODEL, "hello")
    assert refused.returncode == 1
    assert "makes embeddings" in refused.stderr
