"""What OpenAI's generation routes answer: whole objects, and the chunks of a stream."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import msgspec

from brokers.job import FinishReason, Usage
from brokers.spelling import Spelling
from brokers.views import TokenLogprob
from producers.scores import Score, finite, text_of, worded


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


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a choice's tokens, or of those that a chunk brings."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Likewise, side by side, as completions have them."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
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
    logprobs: ChatLogprobs | None = None
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
    logprobs: TextLogprobs | None = None
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


class Said(NamedTuple):
    """What a choice has said, all of it or one chunk."""

    text: str
    scores: list[Score]


class About(NamedTuple):
    """What every answer to one request says of itself."""

    request_id: str
    created: int
    model: str
    spelling: Spelling | None = None  # of the model's tokens, when their logprobs are asked for


class Shape(Protocol):
    """How one route words what was generated."""

    def whole(self, said: list[tuple[Said, FinishReason]], usage: UsageBody) -> object: ...

    def opening(self, index: int) -> object | None:
        """The chunk that comes before a choice's text, if there is one."""

    def chunk(self, index: int, said: Said) -> object: ...

    def finish(self, index: int, reason: FinishReason) -> object: ...

    def usage(self, usage: UsageBody) -> object: ...


class ChatShape:
    """POST /v1/chat/completions."""

    def __init__(self, about: About, service_tier: str | None) -> None:
        self._id = f"chatcmpl-{about.request_id}"
        self._about = about
        self._tier = service_tier

    def whole(self, said: list[tuple[Said, FinishReason]], usage: UsageBody) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=i,
                message=ChatAnswer(content=one.text),
                logprobs=self._logprobs(one),
                finish_reason=reason.value,
            )
            for i, (one, reason) in enumerate(said)
        ]
        return ChatCompletion(
            id=self._id,
            created=self._about.created,
            model=self._about.model,
            choices=choices,
            usage=usage,
            service_tier=self._tier,
        )

    def opening(self, index: int) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])

    def chunk(self, index: int, said: Said) -> ChatChunk:
        delta = Delta(content=said.text)
        return self._chunk([ChatChunkChoice(index=index, delta=delta, logprobs=self._logprobs(said))])

    def finish(self, index: int, reason: FinishReason) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=Delta(), finish_reason=reason.value)])

    def usage(self, usage: UsageBody) -> ChatChunk:
        return self._chunk([], usage)

    def _logprobs(self, said: Said) -> ChatLogprobs | None:
        spelling = self._about.spelling
        return ChatLogprobs(content=worded(said.scores, spelling)) if spelling else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._about.created,
            model=self._about.model,
            choices=choices,
            usage=usage,
            service_tier=self._tier,
        )


class CompletionShape:
    """POST /v1/completions."""

    def __init__(self, about: About) -> None:
        self._id = f"cmpl-{about.request_id}"
        self._about = about

    def whole(self, said: list[tuple[Said, FinishReason]], usage: UsageBody) -> Completion:
        choices = [
            TextChoice(index=i, text=one.text, logprobs=self._logprobs(one), finish_reason=reason.value)
            for i, (one, reason) in enumerate(said)
        ]
        return self._completion(choices, usage)

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, said: Said) -> Completion:
        return self._completion([TextChoice(index=index, text=said.text, logprobs=self._logprobs(said))])

    def finish(self, index: int, reason: FinishReason) -> Completion:
        return self._completion([TextChoice(index=index, text="", finish_reason=reason.value)])

    def usage(self, usage: UsageBody) -> Completion:
        return self._completion([], usage)

    def _logprobs(self, said: Said) -> TextLogprobs | None:
        spelling = self._about.spelling
        if spelling is None:
            return None
        tokens = [text_of(spelling.of(score.token_id)) for score in said.scores]
        tops = [
            {text_of(spelling.of(token_id)): finite(logprob) for token_id, logprob in score.scored.top}
            | {token: finite(score.scored.logprob)}
            for token, score in zip(tokens, said.scores, strict=True)
        ]
        return TextLogprobs(
            tokens=tokens,
            token_logprobs=[finite(score.scored.logprob) for score in said.scores],
            top_logprobs=tops if any(score.scored.top for score in said.scores) else None,
            text_offset=[score.offset for score in said.scores],
        )

    def _completion(self, choices: list[TextChoice], usage: UsageBody | None = None) -> Completion:
        return Completion(
            id=self._id, created=self._about.created, model=self._about.model, choices=choices, usage=usage
        )


def total(usages: list[Usage], choices_per_prompt: int) -> UsageBody:
    """A prompt counts once, however many answers were asked for it."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages[::choices_per_prompt])
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
