"""OpenAI's requests: what is refused, and how prompts and usage are counted."""

from __future__ import annotations

from typing import Any

import pytest

from brokers.job import Lane, Usage
from producers.openai import requests
from producers.openai.replies import total
from producers.openai.requests import ChatRequest, CompletionRequest, prompts_of, refuse_unsupported
from producers.problems import Problem


def _completion(prompt: Any, n: int | None = None) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt, n=n)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_way_to_give_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert prompts_of(_completion(prompt)) == prompts


@pytest.mark.parametrize(("prompt", "n"), [([], 1), (["a", 1], 1), (["a", [1]], 1), (["a"] * 17, 1), (["a"] * 5, 8)])
def test_a_mixture_none_or_too_many_are_refused(prompt: Any, n: int) -> None:
    with pytest.raises(Problem):
        prompts_of(_completion(prompt, n))


def test_every_field_that_is_refused_is_a_field_of_a_request() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert set(requests._HARMLESS) <= known


@pytest.mark.parametrize("value", [None, "none"])
def test_a_value_that_asks_for_nothing_passes(value: Any) -> None:
    refuse_unsupported(ChatRequest(model="m", messages=[], tool_choice=value))


def test_a_value_that_would_be_ignored_is_refused_by_name() -> None:
    with pytest.raises(Problem) as caught:
        refuse_unsupported(ChatRequest(model="m", messages=[], reasoning_effort="high"))
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("field", ["tools", "tool_choice", "functions", "function_call"])
def test_tools_are_refused_with_what_to_do_instead(field: str) -> None:
    with pytest.raises(Problem) as caught:
        refuse_unsupported(ChatRequest(model="m", messages=[], **{field: "auto"}))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (400, field)
    assert "response_format" in caught.value.hint


def test_lanes_follow_the_service_tier() -> None:
    tiers: dict[Any, Lane] = {None: Lane.INTERACTIVE, "auto": Lane.INTERACTIVE, "flex": Lane.BATCH}
    for tier, lane in tiers.items():
        assert ChatRequest(model="m", messages=[], service_tier=tier).lane is lane


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    usage = total([Usage(3, 10), Usage(3, 20), Usage(5, 1), Usage(5, 2)], choices_per_prompt=2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 33, 41)
