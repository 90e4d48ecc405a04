"""From what a client wrote to the token ids a model reads, with the room that leaves for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from brokers.errors import UnsupportedModel
from brokers.job import Kind
from brokers.models import Model
from producers.bodies import check_text
from producers.limits import INLINE_CHARS
from producers.platform import Platform
from producers.problems import Problem

Conversation = list[dict[str, str]]
Tokens = tuple[int, ...]


class Fit(NamedTuple):
    """A prompt that fits its model."""

    ids: Tokens
    max_tokens: int


def text_model(platform: Platform, name: str) -> Model:
    """The text model of that name. Raises UnknownModel, UnsupportedModel."""
    model = platform.registry.get(name)
    if model.card.kind is not Kind.TEXT:
        raise UnsupportedModel(f"model {name!r} makes no text: its kind is {model.card.kind.value!r}")
    return model


async def encode_text(platform: Platform, model: Model, text: str) -> Tokens:
    """Token ids of a plain prompt. Raises Problem."""
    if not text:
        raise Problem("empty_prompt", "prompt is empty", param="prompt")
    check_text(text, "prompt")
    _check_length(platform, len(text), "prompt")
    if len(text) <= INLINE_CHARS:
        return model.encode(text)
    return await asyncio.to_thread(model.encode, text)


async def encode_chat(platform: Platform, model: Model, messages: Conversation) -> Tokens:
    """Token ids of a conversation, ready for the answer. Raises Problem, PromptRejected."""
    chars = sum(len(message["content"]) for message in messages)
    _check_length(platform, chars, "messages")
    if chars <= INLINE_CHARS:
        return model.encode_chat(messages)
    return await asyncio.to_thread(model.encode_chat, messages)


def check_ids(model: Model, ids: list[int], param: str) -> Tokens:
    """Token ids a client sent. Raises Problem."""
    if not ids:
        raise Problem("empty_prompt", f"{param} is empty", param=param)
    check_known(model, ids, param)
    return tuple(ids)


def check_known(model: Model, ids: Iterable[int], param: str) -> None:
    """Refuse what is no token of the model's. Raises Problem."""
    bad = next((i for i in ids if not 0 <= i < model.card.vocab_size), None)
    if bad is not None:
        limit = model.card.vocab_size - 1
        raise Problem("invalid_parameter", f"{param} holds {bad}; token ids go from 0 to {limit}", param=param)


def fit(model: Model, ids: Tokens, max_tokens: int | None, default: int) -> Fit:
    """The prompt with its max_tokens: those asked for, or `default` or what room there is. Raises Problem."""
    if not ids:
        raise Problem("empty_prompt", "the prompt has no tokens")
    context = model.card.max_context
    room = context - len(ids)
    if room < 1:
        raise Problem(
            "context_exceeded",
            f"the prompt has {len(ids)} tokens, and {model.card.name!r} takes {context - 1} and one to answer",
        )
    if max_tokens is not None and max_tokens > room:
        raise Problem(
            "context_exceeded",
            f"the prompt's {len(ids)} tokens and max_tokens {max_tokens} make {len(ids) + max_tokens}, "
            f"and {model.card.name!r} takes {context}",
            param="max_tokens",
            hint=f"Set max_tokens to {room} or less, or shorten the prompt.",
        )
    return Fit(ids, max_tokens or min(default, room))


def _check_length(platform: Platform, chars: int, param: str) -> None:
    most = platform.settings.max_prompt_chars
    if chars > most:
        raise Problem("prompt_too_long", f"{param} has {chars} characters, and at most {most} are taken", param=param)
