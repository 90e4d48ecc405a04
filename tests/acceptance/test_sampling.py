"""How tokens are drawn, over HTTP: biases, stop ids, logprobs, JSON, choices; and what is impossible fails alone.

A random Llama on a worker of its own does the drawing: its texts are noise, and its JSON is JSON all the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from httpx_sse import connect_sse
from openai import OpenAI
from pydantic import BaseModel

from brokers import names, topology
from brokers.job import Lane
from compose import commands, probes
from compose.servers import Process
from tests.platform import Platform
from tests.random_llama import EOS, POISON, create_random_llama

MODEL = "llama"
_START_S = 60.0
_ASK: list[Any] = [{"role": "user", "content": "hello"}]
_ASCII = {str(token): -100 for token in range(128, 259) if token != EOS}
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_WAIT = {"Prefer": "wait=20"}


class Answer(BaseModel):
    """What a text is held to; every part of it is bounded."""

    count: int
    name: Literal["ann", "bob"]
    tags: list[Literal["sea", "lamp"]]


SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"enum": ["ann", "bob"]},
        "tags": {"type": "array", "items": {"enum": ["sea", "lamp"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["count", "name", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module", autouse=True)
def worker(platform: Platform, state: Path) -> Iterator[Process]:
    create_random_llama(platform.settings.models_dir, MODEL)
    topology.declare(platform.settings, [MODEL])
    process = Process(
        "llama",
        commands.worker(platform.settings, [MODEL], name="llama"),
        env=commands.environment(state / "lingbot.toml", threads=1, slots=8, kv_tokens=8192),
        log=state / "logs" / "llama.log",
        pid_file=state / "run" / "llama.pid",
    )
    process.spawn()
    try:
        deadline = time.monotonic() + _START_S
        while not probes.consumed(platform.settings, names.queue(platform.settings.region, MODEL, Lane.STANDARD)):
            assert process.alive, process.tail(40)
            assert time.monotonic() < deadline, process.tail(40)
            time.sleep(0.1)
        yield process
    finally:
        process.stop(grace_s=10)


@pytest.fixture(scope="module")
def client(platform: Platform) -> OpenAI:
    return OpenAI(base_url=f"{platform.base_url}/v1", api_key=platform.api_key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def http(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=60) as client:
        yield client


def job(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A native job that was waited for."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "seed": 5, "ignore_eos": True, **fields}
    response = http.post("/v1/jobs", json=body, headers=_WAIT)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def said(http: httpx.Client, **fields: Any) -> str:
    return str(job(http, **fields)["result"]["text"])


def spoken(scored: list[dict[str, Any]]) -> str:
    """The text of scored tokens, most of which is no text: a character may be spread over several of them."""
    return bytes(byte for one in scored for byte in one["bytes"]).decode(errors="replace")


def test_a_bias_makes_and_forbids_tokens(http: httpx.Client) -> None:
    assert said(http, logit_bias={"65": 100}) == "A" * 24
    plain = job(http, temperature=0, logprobs=0)["result"]["logprobs"]
    first = plain[0]["token_id"]
    never = job(http, temperature=0, logprobs=0, logit_bias={str(first): -100})["result"]["logprobs"]
    assert first not in [one["token_id"] for one in never]


def test_a_stop_token_ends_the_text_and_is_not_shown(http: httpx.Client) -> None:
    scored = job(http, logprobs=0)["result"]["logprobs"]
    stop = scored[10]["token_id"]
    expected = [one["token_id"] for one in scored]
    cut = job(http, logprobs=0, stop_token_ids=[stop])["result"]
    assert cut["finish_reason"] == "stop"
    assert [one["token_id"] for one in cut.get("logprobs", [])] == expected[: expected.index(stop)]


def test_logprobs_are_in_results_and_events_of_jobs_that_ask(http: httpx.Client) -> None:
    ended = job(http, logprobs=3, temperature=0, max_tokens=64)
    scored = ended["result"]["logprobs"]
    assert len(scored) == 64
    assert spoken(scored).rstrip(_UNKNOWN) == ended["result"]["text"].rstrip(_UNKNOWN)  # half a character is not shown
    for one in scored:
        assert (one["token_id"], one["logprob"]) == tuple(
            one["top_logprobs"][0][name] for name in ("token_id", "logprob")
        )
        assert len(one["top_logprobs"]) == 3
        assert 0 >= one["top_logprobs"][0]["logprob"] >= one["top_logprobs"][2]["logprob"]
    with connect_sse(http, "GET", ended["urls"]["events"], params={"after": 20}) as source:
        tokens = [event.json() for event in source.iter_sse() if event.event == "token"]
    assert [one for event in tokens for one in event["logprobs"]] == scored[20:]


def test_logprobs_of_nobody_who_did_not_ask(http: httpx.Client) -> None:
    ended = job(http)
    assert "logprobs" not in ended["result"]
    with connect_sse(http, "GET", ended["urls"]["events"]) as source:
        assert not [event for event in source.iter_sse() if "logprobs" in event.data]


def test_chat_logprobs_are_openais(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": _ASK, "max_tokens": 40, "seed": 3, "n": 2}
    ask |= {"logprobs": True, "top_logprobs": 2, "temperature": 0.8, "logit_bias": _ASCII}
    choices = client.chat.completions.create(**ask).choices
    streamed: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            if choice.logprobs:
                streamed[choice.index] += choice.logprobs.content or []
    for choice, pieces in zip(choices, streamed, strict=True):
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert pieces == content
        assert choice.logprobs.refusal is None
        assert bytes(byte for one in content for byte in one.bytes or []).decode() == choice.message.content
        assert "".join(one.token for one in content) == choice.message.content
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in content)


def test_chat_without_logprobs_has_none(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=_ASK, max_tokens=4)
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("top", [0, 2])
def test_completions_logprobs_are_openais(client: OpenAI, top: int) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "once", "max_tokens": 32, "seed": 3, "logprobs": top}
    ask["logit_bias"] = _ASCII
    (choice,) = client.completions.create(**ask).choices
    whole = choice.logprobs
    assert whole is not None
    assert len(whole.tokens or []) == len(whole.token_logprobs or []) == len(whole.text_offset or [])
    for token, offset in zip(whole.tokens or [], whole.text_offset or [], strict=True):
        assert choice.text[offset : offset + len(token)] == token
    if top:
        assert all(top <= len(best) <= top + 1 for best in whole.top_logprobs or [])
        for token, own, best in zip(
            whole.tokens or [], whole.token_logprobs or [], whole.top_logprobs or [], strict=True
        ):
            assert best[token] == own
    else:
        assert whole.top_logprobs is None
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**ask, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        pieces = [one for chunk in chunks if chunk for one in getattr(chunk, name)]
        assert pieces == getattr(whole, name)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_held_to_its_schema(client: OpenAI, http: httpx.Client, temperature: float) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": _ASK, "max_tokens": 200, "temperature": temperature, "seed": 8}
    ask |= {"response_format": FORMAT}
    (choice,) = client.chat.completions.create(**ask).choices
    assert choice.finish_reason == "stop"
    answer = Answer.model_validate_json(choice.message.content or "")
    assert 0 <= answer.count <= 999
    assert 2 <= len(answer.tags) <= 4
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    native = said(
        http, prompt="hello", max_tokens=200, temperature=temperature, ignore_eos=False, response_format=FORMAT
    )
    Answer.model_validate_json(native)


def test_completions_are_held_to_a_schema_too(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=200, n=2, seed=4, extra_body={"response_format": FORMAT}
    )
    answers = [Answer.model_validate_json(choice.text) for choice in answer.choices]
    assert answers[0] != answers[1]


def test_the_clients_own_parsing_of_a_class_works(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=_ASK, max_tokens=1500, response_format=Answer, temperature=0.7, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_json_mode_says_an_object(client: OpenAI) -> None:
    end: Any = {str(ord("}")): 100.0}  # noise would go on for long
    answer = client.chat.completions.create(
        model=MODEL, messages=_ASK, max_tokens=500, response_format={"type": "json_object"}, logit_bias=end
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_json_that_does_not_fit_into_max_tokens_is_cut_and_says_so(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=_ASK, max_tokens=5, response_format=FORMAT)
    assert answer.choices[0].finish_reason == "length"


def test_choices_are_keyed_by_seed_position_and_choice(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["ab", "cd"], "max_tokens": 20, "seed": 6}
    several = client.completions.create(**ask, n=3)
    again = client.completions.create(**ask, n=3)
    assert [choice.text for choice in several.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in several.choices}) == 6
    one = client.completions.create(**ask)
    assert [choice.text for choice in one.choices] == [several.choices[0].text, several.choices[3].text]
    assert several.usage is not None
    completion_tokens = several.usage.completion_tokens
    assert (several.usage.prompt_tokens, several.usage.total_tokens) == (4, 4 + completion_tokens)


BAD_SCHEMAS = {
    "unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 3}, "invalid_schema"),
    "not obeyed": ({"type": "array", "uniqueItems": True}, "invalid_schema"),
    "no regex": ({"type": "string", "pattern": "("}, "invalid_schema"),
    "endless": (
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]},
        "schema_too_complex",
    ),
}


@pytest.mark.parametrize("which", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_followed_is_no_job(client: OpenAI, http: httpx.Client, which: str) -> None:
    schema, code = BAD_SCHEMAS[which]
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=_ASK, response_format=asked)
    assert (caught.value.code, caught.value.param) == (code, "response_format.json_schema.schema")
    response = http.post("/v1/jobs", json={"model": MODEL, "prompt": "x", "response_format": asked})
    assert (response.status_code, response.json()["code"]) == (400, code)


COSTLY = {"type": "string", "pattern": "^(.*[ -~].{100}){40}$"}
"""Compiled at once; what it allows after some hundred characters takes ever longer to find out."""


def test_what_is_bad_fails_alone_while_a_neighbour_writes_on(client: OpenAI, http: httpx.Client) -> None:
    good: dict[str, Any] = {"model": MODEL, "prompt": "a good one", "max_tokens": 1900, "seed": 2}
    good["extra_body"] = {"ignore_eos": True}
    alone = client.completions.create(**good).choices[0].text
    stream = client.completions.create(**good, stream=True)
    text = next(iter(stream)).choices[0].text

    def refused(**fields: Any) -> str:
        ask: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 900} | fields
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**ask)
        return str(caught.value.code)

    costly = {"type": "json_schema", "json_schema": {"schema": COSTLY}}
    assert refused(prompt=[65, POISON]) == "numeric_error"
    assert refused(prompt=[65, 999_999]) == "invalid_parameter"
    assert refused(prompt=[]) == "empty_prompt"
    assert refused(prompt="x" * 3000) == "context_exceeded"
    assert refused(extra_body={"response_format": costly}) == "schema_too_complex"
    assert job(http, logit_bias={str(token): -100 for token in range(259)})["status"] == "succeeded"
    failed = job(http, response_format=costly, ignore_eos=False, max_tokens=900)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "schema_too_complex")
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == alone
