"""An unmodified openai client works: whole and streaming, sync and async, and its errors are the right ones."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from brokers.settings import Settings
from tests.platform import Platform

_ASK: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(platform: Platform) -> OpenAI:
    return _client(platform, platform.api_key)


def _client(platform: Platform, key: str) -> OpenAI:
    return OpenAI(base_url=f"{platform.base_url}/v1", api_key=key, max_retries=0, timeout=30)


def _jobs(platform: Platform, key: str) -> list[dict[str, Any]]:
    response = httpx.get(f"{platform.base_url}/v1/jobs", headers={"Authorization": f"Bearer {key}"})
    return response.json()["data"]  # type: ignore[no-any-return]


def _until_cancelled(platform: Platform, key: str, settings: Settings) -> None:
    deadline = time.monotonic() + settings.reader_grace_s + 3
    while {job["status"] for job in _jobs(platform, key)} != {"cancelled"}:
        assert time.monotonic() < deadline, _jobs(platform, key)
        time.sleep(0.1)


def test_models_are_listed_and_found(platform: Platform, client: OpenAI) -> None:
    assert platform.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(platform.model).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.code == "unknown_model"


def test_a_chat_is_answered(platform: Platform, client: OpenAI) -> None:
    answer = client.chat.completions.create(model=platform.model, messages=_ASK, max_tokens=24, seed=1)
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert (answer.object, answer.model) == ("chat.completion", platform.model)


def test_a_streamed_chat_says_the_same(platform: Platform, client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": platform.model, "messages": _ASK, "max_completion_tokens": 40, "seed": 7}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *spoken, finish, usage = chunks
    assert spoken[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in spoken)
    assert text == whole.choices[0].message.content
    assert finish.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_include_usage_has_no_usage_chunk(platform: Platform, client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=platform.model, messages=_ASK, max_tokens=4, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_natural_end_is_told_as_stop(platform: Platform, client: OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "end !eos@12"}]
    answer = client.chat.completions.create(model=platform.model, messages=ask, max_tokens=100)
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(model=platform.model, messages=ask, max_tokens=100, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_never_leaks_not_even_half(platform: Platform, client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": platform.model, "messages": _ASK, "max_tokens": 80, "seed": 11}
    whole = client.chat.completions.create(**ask).choices[0].message.content or ""
    stop = whole[30:36]
    expected = whole[: whole.index(stop)]
    assert client.chat.completions.create(**ask, stop=[stop, "never"]).choices[0].message.content == expected
    chunks = list(client.chat.completions.create(**ask, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_choices_are_jobs_of_their_own(platform: Platform, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=platform.model, messages=_ASK, max_tokens=32, n=3, seed=2
    )
    answer = raw.parse()
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 96
    assert len(set(raw.headers["X-Lingbot-Jobs"].split(","))) == 3


def test_streamed_choices_come_interleaved_and_whole(platform: Platform, client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": platform.model, "messages": _ASK, "max_tokens": 32, "n": 3, "seed": 2}
    whole = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    texts, finished = ["", "", ""], set()
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.add(choice.index)
    assert texts == whole
    assert finished == {0, 1, 2}


def test_completions_take_texts_and_token_ids(platform: Platform, client: OpenAI) -> None:
    base: dict[str, Any] = {"model": platform.model, "seed": 4}
    one = client.completions.create(**base, prompt="ab")
    assert one.usage is not None
    assert (one.choices[0].finish_reason, one.usage.completion_tokens) == ("length", 16)
    several = client.completions.create(**base, prompt=["ab", "cd"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == one.choices[0].text
    assert several.usage is not None
    assert several.usage.prompt_tokens == 4
    ids = client.completions.create(**base, prompt=[5, 6, 7], max_tokens=3)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    lists = client.completions.create(**base, prompt=[[5, 6, 7], [8]], max_tokens=3)
    assert lists.choices[0].text == ids.choices[0].text


def test_a_streamed_completion_says_the_same(platform: Platform, client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": platform.model, "prompt": "once", "max_tokens": 32, "seed": 4}
    whole = client.completions.create(**ask).choices[0].text
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_async_client_works(platform: Platform) -> None:
    async with AsyncOpenAI(base_url=f"{platform.base_url}/v1", api_key=platform.api_key, max_retries=0) as client:
        ask: dict[str, Any] = {"model": platform.model, "messages": _ASK, "max_tokens": 24, "seed": 1}
        answers = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(8)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await client.chat.completions.create(**ask, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answers[0].choices[0].message.content


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", None])
def test_service_tiers_choose_the_lane(platform: Platform, tier: Any) -> None:
    key = platform.new_key(f"tier{tier}".lower(), {"submit", "read"})
    _client(platform, key).chat.completions.create(model=platform.model, messages=_ASK, max_tokens=2, service_tier=tier)
    (job,) = _jobs(platform, key)
    assert job["lane"] == ("batch" if tier == "flex" else "interactive")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 0}, "invalid_parameter", "n"),
        ({"n": 1000}, "invalid_parameter", "n"),
        ({"n": 0, "stream": True}, "invalid_parameter", "n"),
        ({"max_tokens": 0}, "invalid_parameter", "max_tokens"),
        ({"max_tokens": 9000}, "context_exceeded", "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "invalid_parameter", "max_completion_tokens"),
        ({"temperature": -1}, "invalid_parameter", "temperature"),
        ({"temperature": 3}, "invalid_parameter", "temperature"),
        ({"messages": []}, "invalid_parameter", "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_field", "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "unsupported_parameter", "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "missing_field", "messages[0].content"),
        ({"top_logprobs": 2}, "invalid_parameter", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_parameter", "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "invalid_parameter", "logit_bias[...]"),
        ({"response_format": {"type": "json_schema"}}, "missing_field", "response_format.json_schema"),
        ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
        ({"stream_options": {"include_usage": True}}, "invalid_parameter", "stream_options"),
        ({"extra_body": {"guided_json": {}}}, "unknown_field", "guided_json"),
    ],
)
def test_what_would_be_ignored_or_is_wrong_is_refused(
    platform: Platform, client: OpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    ask: dict[str, Any] = {"model": platform.model, "messages": _ASK} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}])
def test_what_completions_cannot_do_is_refused(platform: Platform, client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=platform.model, prompt="x", **fields)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize("prompt", [["a", 1], [], [[]], "", [10**9], [-1], [[1], "a"], ["a"] * 17])
def test_a_wrong_prompt_is_refused(platform: Platform, client: OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=platform.model, prompt=prompt)


def test_values_that_ask_for_nothing_are_taken(platform: Platform, client: OpenAI) -> None:
    client.chat.completions.create(
        model=platform.model,
        messages=_ASK,
        max_tokens=2,
        user="someone",
        metadata={"a": "b"},
        logprobs=False,
        response_format={"type": "text"},
        logit_bias={},
        tool_choice="none",
        store=False,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )


def test_a_prompt_that_fails_takes_the_requests_other_choices_with_it(platform: Platform, client: OpenAI) -> None:
    key = platform.new_key("together", {"submit", "read"})
    with pytest.raises(openai.InternalServerError):
        _client(platform, key).completions.create(
            model=platform.model, prompt=["slow !slow@10", "bad !raise@3"], max_tokens=2000, n=2
        )
    deadline = time.monotonic() + 5
    while (ends := sorted(job["status"] for job in _jobs(platform, key))) != ["cancelled"] * 2 + ["failed"] * 2:
        assert time.monotonic() < deadline, ends
        time.sleep(0.05)


def test_errors_are_the_clients_own_kinds(platform: Platform, client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        _client(platform, "lb_acceptance_" + "0" * 40).models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as refused:
        _client(platform, platform.new_key("acceptance", {"read"})).completions.create(model=platform.model, prompt="x")
    assert refused.value.code == "missing_scope"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=_ASK)
    assert missing.value.code == "unknown_model"


def test_a_failed_generation_is_an_error_and_is_not_sent_again(platform: Platform) -> None:
    key = platform.new_key("failing", {"submit", "read"})
    client = OpenAI(base_url=f"{platform.base_url}/v1", api_key=key, max_retries=2)
    ask: list[Any] = [{"role": "user", "content": "fail !raise@5"}]
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=platform.model, messages=ask, max_tokens=20)
    assert caught.value.code == "generation_failed"
    assert len(_jobs(platform, key)) == 1


def test_a_stream_that_breaks_does_not_look_finished(platform: Platform, client: OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "break !raise@9"}]
    chunks: list[Any] = []
    stream = client.chat.completions.create(model=platform.model, messages=ask, max_tokens=40, stream=True)
    with pytest.raises(openai.APIError, match="generation failed"):
        chunks.extend(stream)
    assert all(choice.finish_reason is None for chunk in chunks for choice in chunk.choices)
    body = {"model": platform.model, "messages": ask, "max_tokens": 40, "stream": True}
    raw = httpx.post(
        f"{platform.base_url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {platform.api_key}"}
    )
    assert "[DONE]" not in raw.text


def test_a_job_cancelled_under_its_reader_ends_the_stream_in_an_error(platform: Platform, client: OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "cancel me !slow@5"}]
    raw = client.chat.completions.with_raw_response.create(
        model=platform.model, messages=ask, max_tokens=2000, stream=True
    )
    stream = raw.parse()
    next(iter(stream))
    job = raw.headers["X-Lingbot-Jobs"]
    httpx.post(f"{platform.base_url}/v1/jobs/{job}/cancel", headers={"Authorization": f"Bearer {platform.api_key}"})
    with pytest.raises(openai.APIError, match="cancelled"):
        list(stream)


def test_a_streaming_reader_that_goes_away_takes_its_jobs_with_it(platform: Platform, settings: Settings) -> None:
    key = platform.new_key("goner", {"submit", "read"})
    ask: list[Any] = [{"role": "user", "content": "leaving !slow@10"}]
    stream = _client(platform, key).chat.completions.create(
        model=platform.model, messages=ask, max_tokens=3000, n=2, stream=True
    )
    next(iter(stream))
    stream.close()
    assert {job["status"] for job in _jobs(platform, key)} == {"running"}
    _until_cancelled(platform, key, settings)


def test_a_waiting_caller_that_goes_away_takes_its_job_with_it(platform: Platform, settings: Settings) -> None:
    key = platform.new_key("impatient", {"submit", "read"})
    client = OpenAI(base_url=f"{platform.base_url}/v1", api_key=key, max_retries=0, timeout=0.5)
    ask: list[Any] = [{"role": "user", "content": "waiting !slow@10"}]
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model=platform.model, messages=ask, max_tokens=3000)
    _until_cancelled(platform, key, settings)
