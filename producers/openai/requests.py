"""What OpenAI's generation routes take.

A field of theirs that would change the answer and is not supported is refused, never ignored; values that ask for
nothing are taken. `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and
`stop_token_ids` are extensions, and so is `response_format` for completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from brokers.job import Lane
from producers.limits import CHOICES, PROMPTS, SEQUENCES
from producers.problems import Problem
from producers.schemas import Count, Part, SamplingFields, Top

_LANES = {"flex": Lane.BATCH, "standard": Lane.STANDARD}

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields not supported here, and the values, beside null, that ask for nothing."""

_TOOLS = "Tools are to come. Until then describe the functions in a message, and ask for the call with response_format."
_HINTS = dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _TOOLS)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against an eavesdropper; there is none to add


class GenerationRequest(SamplingFields, kw_only=True, frozen=True):
    """What chat and completions share."""

    model: Annotated[str, Meta(min_length=1, max_length=128)]
    n: Annotated[int, Meta(ge=1, le=CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    service_tier: Literal["auto", "default", "flex", "standard", "priority"] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Any = None

    @property
    def lane(self) -> Lane:
        return _LANES.get(self.service_tier or "", Lane.INTERACTIVE)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn, as a client writes it or as an earlier answer gave it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    logprobs: bool | None = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Top | None = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise Problem("invalid_parameter", "top_logprobs goes with logprobs: true", param="top_logprobs")
        return None


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: Top | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raises Problem for a field that would be ignored."""
    for name, harmless in _HARMLESS.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise Problem("unsupported_parameter", f"{name} is not supported here", param=name, hint=_HINTS.get(name))
    if request.stream_options is not None and not request.stream:
        raise Problem("invalid_parameter", "stream_options goes with stream: true", param="stream_options")


def check_messages(messages: list[ChatMessage]) -> None:
    """Raises Problem for turns that speak of tools, and for those without content."""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role in {"tool", "function"} or message.tool_calls or message.function_call:
            raise Problem("unsupported_parameter", f"{where}: tools are not supported here", param=where, hint=_TOOLS)
        if message.audio:
            raise Problem("unsupported_parameter", f"{where}: audio is not supported here", param=where)
        if message.content is None:
            raise Problem("missing_field", f"{where}.content is missing", param=f"{where}.content")


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts one by one. Raises Problem for a mixture, for none, and for too many."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Problem("empty_prompt", "prompt is empty", param="prompt")
    prompts = _alike(prompt)
    sequences = len(prompts) * (request.n or 1)
    if len(prompts) > PROMPTS or sequences > SEQUENCES:
        raise Problem(
            "invalid_parameter",
            f"at most {PROMPTS} prompts and {SEQUENCES} answers in one request; this asks for {sequences}",
            param="prompt",
        )
    return prompts


def _alike(items: list[str | int | list[int]]) -> list[str | list[int]]:
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) == len(items):
        return [ids]
    prompts = [item for item in items if not isinstance(item, int)]
    if len(prompts) < len(items) or len({type(item) for item in prompts}) > 1:
        raise Problem("invalid_parameter", "prompt: give texts, or token ids, or lists of them", param="prompt")
    return prompts
