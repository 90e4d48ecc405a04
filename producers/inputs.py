"""From the `input` of a request to what an embedding model reads: token ids, checked one input after the other."""

from __future__ import annotations

import asyncio

from brokers.errors import UnsupportedModel
from brokers.job import EmbeddingSpec, Kind
from brokers.models import Model
from producers.bodies import check_text
from producers.limits import INLINE_CHARS, INPUT_TOKENS, INPUTS
from producers.platform import Platform
from producers.problems import Problem
from producers.prompts import Tokens, check_ids

Given = str | list[str | int | list[int]]
"""A text, texts, token ids, or lists of token ids, as OpenAI takes them."""

_PARAM = "input"


def embedding_model(platform: Platform, name: str) -> Model:
    """The embedding model of that name. Raises UnknownModel, UnsupportedModel."""
    model = platform.registry.get(name)
    if model.card.kind is not Kind.EMBEDDING:
        raise UnsupportedModel(f"model {name!r} makes no embeddings: its kind is {model.card.kind.value!r}")
    return model


async def embedding_spec(platform: Platform, model: Model, given: Given, dimensions: int | None) -> EmbeddingSpec:
    """What the request asks for. Nothing is ever truncated: raises Problem for what the model does not take."""
    most = model.card.dimensions
    if dimensions is not None and dimensions > most:
        raise Problem(
            "invalid_parameter", f"dimensions: the vectors of {model.card.name!r} have {most}", param="dimensions"
        )
    texts, lists = _one_by_one(given)
    most_chars = platform.settings.max_prompt_chars
    if sum(map(len, texts)) + sum(map(len, lists)) <= INLINE_CHARS:
        encoded = _encode(model, texts, lists, most_chars)
    else:
        encoded = await asyncio.to_thread(_encode, model, texts, lists, most_chars)
    return EmbeddingSpec(encoded, dimensions or 0)


def _one_by_one(given: Given) -> tuple[list[str], list[list[int]]]:
    """The inputs: either texts, or lists of ids. Raises Problem for a mixture, for none, and for too many."""
    if isinstance(given, str):
        return [given], []
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [], [ids]
    texts = [item for item in given if isinstance(item, str)]
    lists = [item for item in given if isinstance(item, list)]
    if not given:
        raise Problem("empty_prompt", "input is empty", param=_PARAM)
    if len(given) not in (len(texts), len(lists)):
        raise Problem("invalid_parameter", "input: give texts, or token ids, or lists of them", param=_PARAM)
    if len(given) > INPUTS:
        raise Problem(
            "invalid_parameter",
            f"input holds {len(given)} inputs, and at most {INPUTS} are taken in one request",
            param=_PARAM,
            hint="Send the rest in further requests.",
        )
    return texts, lists


def _encode(model: Model, texts: list[str], lists: list[list[int]], most_chars: int) -> tuple[Tokens, ...]:
    for place, text in enumerate(texts):
        _check_text(text, f"{_PARAM}[{place}]", most_chars)
    encoded = model.encode_all(texts) or [check_ids(model, ids, f"{_PARAM}[{at}]") for at, ids in enumerate(lists)]
    _check_tokens(model, encoded)
    return tuple(encoded)


def _check_text(text: str, param: str, most_chars: int) -> None:
    if not text:
        raise Problem("empty_prompt", f"{param} is empty", param=param)
    if len(text) > most_chars:
        raise Problem("prompt_too_long", f"{param} has {len(text)} characters; {most_chars} are taken", param=param)
    check_text(text, param)


def _check_tokens(model: Model, encoded: list[Tokens]) -> None:
    most = model.card.max_context
    for place, ids in enumerate(encoded):
        param = f"{_PARAM}[{place}]"
        if not ids:
            raise Problem("empty_prompt", f"{param} has no tokens", param=param)
        if len(ids) > most:
            raise Problem(
                "context_exceeded",
                f"{param} has {len(ids)} tokens, and {model.card.name!r} takes {most} in one input",
                param=param,
                hint="Cut the input into shorter ones.",
            )
    total = sum(map(len, encoded))
    if total > INPUT_TOKENS:
        raise Problem(
            "context_exceeded",
            f"the inputs have {total} tokens, and at most {INPUT_TOKENS} are taken in one request",
            param=_PARAM,
            hint="Send the rest in further requests.",
        )
