"""The `input` of an embedding request: what it may be, and what is refused before anything is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from brokers.models import Model
from producers.inputs import embedding_spec
from producers.limits import INPUTS
from producers.problems import Problem
from workers.weights.scripted import create_scripted_embedder

CHARS = 5000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")
    create_scripted_embedder(folder, "embedder")
    return Model(folder / "embedder")


async def spec(model: Model, given: Any, dimensions: int | None = None) -> Any:
    platform: Any = SimpleNamespace(settings=SimpleNamespace(max_prompt_chars=CHARS))
    return await embedding_spec(platform, model, given, dimensions)


@pytest.mark.parametrize("given", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_a_text_and_its_ids_are_the_same_however_they_come(model: Model, given: Any) -> None:
    found = await spec(model, given)
    assert found.inputs in ((tuple(model.encode("ab")),), ((97, 98),))
    assert (found.dimensions, found.prompt_tokens) == (0, 2)


async def test_many_inputs_keep_their_order_also_when_a_thread_encodes_them(model: Model) -> None:
    texts = [f"text {n}" for n in range(1500)]
    found = await spec(model, texts, 3)
    assert found.inputs == tuple(model.encode(text) for text in texts)
    assert (found.dimensions, found.prompt_tokens) == (3, sum(map(len, texts)))


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        (["a"] * (INPUTS + 1), "invalid_parameter", "input"),
        (["a" * 512, "a" * 513], "context_exceeded", "input[1]"),
        ([[1] * 513], "context_exceeded", "input[0]"),
        ("a" * (CHARS + 1), "prompt_too_long", "input[0]"),
        ([""], "empty_prompt", "input[0]"),
        ([[]], "empty_prompt", "input[0]"),
        ([], "empty_prompt", "input"),
        ([1, "a"], "invalid_parameter", "input"),
        ([[1], 1], "invalid_parameter", "input"),
        ([-1], "invalid_parameter", "input[0]"),
        ([2**70], "invalid_parameter", "input[0]"),
    ],
)
async def test_what_the_model_does_not_take_is_refused(model: Model, given: Any, code: str, param: str) -> None:
    with pytest.raises(Problem) as caught:
        await spec(model, given)
    assert (caught.value.code, caught.value.param) == (code, param)
