"""What the native routes take and answer, with the documented bounds. Unknown fields are refused by name."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from brokers.job import Kind, Lane
from brokers.views import JobView
from producers.bodies import check_text
from producers.limits import BIASES, STOP_CHARS, STOPS, TOP_LOGPROBS
from producers.problems import Problem

Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS)]
Label = Annotated[str, Meta(min_length=1, max_length=64)]
Note = Annotated[str, Meta(max_length=512)]
Top = Annotated[
    int,
    Meta(ge=0, le=TOP_LOGPROBS, description="With each token its log probability, and those of so many best ones"),
]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]

_ROLES = {"developer": "system"}  # OpenAI's newer word for it; chat templates know the older one


class NamedSchema(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A JSON schema. It is always followed to the letter, whatever `strict` says."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the text must be: anything, a JSON object, or JSON that meets a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn, named as OpenAI names it, and five more."""

    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy; 1 when not given")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="Share of probability kept")] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Tokens kept; 0 keeps all")] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1, description="Least share of the best token's probability")] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="Drawn when not given")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS)] | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=0.01, le=10, description="Over prompt and output; 1 is off")] | None
    ) = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    ignore_eos: Annotated[bool, Meta(description="Go on past the model's own end")] | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=BIASES, description="By token id; added to its logit"),
        ]
        | None
    ) = None
    stop_token_ids: (
        Annotated[list[int], Meta(max_length=STOPS, description="They end the text and are not part of it")] | None
    ) = None
    response_format: ResponseFormat | None = None

    @property
    def alternatives(self) -> int | None:
        """The best tokens whose logprobs are asked for beside the drawn one's; None when none are. Raises Problem."""
        return None


class Part(msgspec.Struct, frozen=True):
    """One part of a message; text is the kind there is."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class WebhookRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom to tell of the job's end, as Standard Webhooks says."""

    url: Annotated[str, Meta(min_length=1, max_length=2048, description="https")]
    secret: Annotated[str, Meta(max_length=100, description="24 to 64 bytes in base64; signs it")] | None = None


class JobRequest(SamplingFields, kw_only=True, frozen=True):
    """A job. Give a text model `prompt` or `messages`, an embedding model `input`."""

    model: Annotated[str, Meta(min_length=1, max_length=128)]
    kind: Kind | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    input: str | list[str | int | list[int]] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1, description="Of each embedding; all when not given")] | None = (
        None
    )
    max_tokens: Count | None = None
    logprobs: Top | None = None
    lane: Lane = Lane.STANDARD
    expires_in: Annotated[int, Meta(ge=1, le=2**31 - 1, description="Seconds it may take, from its start")] | None = (
        None
    )
    start_at: Annotated[datetime, Meta(tz=True, description="Not before; or unix seconds")] | float | None = None
    delay: Annotated[float, Meta(ge=0, description="Seconds before it starts")] | None = None
    webhook: WebhookRequest | None = None
    metadata: Annotated[dict[Label, Note], Meta(max_length=16)] | None = None
    backpressure: Annotated[Literal["detach"], Meta(description="The job goes on without readers")] | None = None
    region: str | None = None
    residency: msgspec.Raw | UnsetType = UNSET

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs, newest first. `next_before` continues the listing."""

    object: str = "list"
    data: list[JobView]
    has_more: bool
    next_before: str | None = None


def conversation(messages: list[Any]) -> list[dict[str, str]]:
    """Messages as a chat template takes them: roles it knows, content as one text. Raises Problem."""
    return [
        {"role": _ROLES.get(m.role, m.role), "content": _content(m.content, f"messages[{i}].content")}
        for i, m in enumerate(messages)
    ]


def _content(content: str | list[Part], param: str) -> str:
    if isinstance(content, str):
        check_text(content, param)
        return content
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise Problem(
                "unsupported_parameter",
                f"{param}[{i}] is of type {part.type[:40]!r}; text parts are what the models here read",
                param=f"{param}[{i}].type",
            )
        check_text(part.text, f"{param}[{i}].text")
    return "".join(part.text or "" for part in content)
