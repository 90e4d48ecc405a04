"""What OpenAI's generation routes answer: whole objects, and the chunks of a stream."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from brokers.job import FinishReason, Usage


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The message of one choice."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice."""

    index: int
    message: ChatAnswer
    logprobs: None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: str | None = None
    system_fingerprint: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to one choice."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    service_tier: str | None = None
    system_fingerprint: None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or a chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | None = None
    system_fingerprint: None = None


class Shape(Protocol):
    """How one route words what was generated."""

    def whole(self, texts: list[tuple[str, FinishReason]], usage: UsageBody) -> object: ...

    def opening(self, index: int) -> object | None:
        """The chunk that comes before a choice's text, if there is one."""

    def text(self, index: int, text: str) -> object: ...

    def finish(self, index: int, reason: FinishReason) -> object: ...

    def usage(self, usage: UsageBody) -> object: ...


class ChatShape:
    """POST /v1/chat/completions."""

    def __init__(self, request_id: str, created: int, model: str, service_tier: str | None) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = created
        self._model = model
        self._tier = service_tier

    def whole(self, texts: list[tuple[str, FinishReason]], usage: UsageBody) -> ChatCompletion:
        choices = [
            ChatChoice(index=i, message=ChatAnswer(content=text), finish_reason=reason.value)
            for i, (text, reason) in enumerate(texts)
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            service_tier=self._tier,
        )

    def opening(self, index: int) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])

    def text(self, index: int, text: str) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=Delta(content=text))])

    def finish(self, index: int, reason: FinishReason) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=Delta(), finish_reason=reason.value)])

    def usage(self, usage: UsageBody) -> ChatChunk:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            service_tier=self._tier,
        )


class CompletionShape:
    """POST /v1/completions."""

    def __init__(self, request_id: str, created: int, model: str) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = created
        self._model = model

    def whole(self, texts: list[tuple[str, FinishReason]], usage: UsageBody) -> Completion:
        choices = [TextChoice(index=i, text=text, finish_reason=reason.value) for i, (text, reason) in enumerate(texts)]
        return self._completion(choices, usage)

    def opening(self, index: int) -> None:
        return None

    def text(self, index: int, text: str) -> Completion:
        return self._completion([TextChoice(index=index, text=text)])

    def finish(self, index: int, reason: FinishReason) -> Completion:
        return self._completion([TextChoice(index=index, text="", finish_reason=reason.value)])

    def usage(self, usage: UsageBody) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[TextChoice], usage: UsageBody | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def total(usages: list[Usage], choices_per_prompt: int) -> UsageBody:
    """A prompt counts once, however many answers were asked for it."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages[::choices_per_prompt])
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
