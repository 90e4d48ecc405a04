"""What a native job asks for, by the kind of its model."""

from __future__ import annotations

import msgspec

from brokers.errors import UnsupportedModel
from brokers.job import Kind, Spec, TextSpec
from brokers.models import Model
from producers import inputs, prompts
from producers.limits import DEFAULT_MAX_TOKENS
from producers.platform import Platform
from producers.problems import Problem
from producers.sampling import sampling
from producers.schemas import JobRequest, SamplingFields, conversation
from producers.submission import new_seed

_OF_TEXTS = ("prompt", "messages", "max_tokens", "logprobs", *SamplingFields.__struct_fields__)
_OF_EMBEDDINGS = ("input", "dimensions")


async def spec_of(platform: Platform, model: Model, body: JobRequest) -> Spec:
    """Raises Problem for what this kind of model cannot be asked too."""
    kind = model.card.kind
    if body.kind not in (None, kind):
        raise _unsupported(f"model {body.model!r} is of kind {kind.value!r}, not {body.kind.value!r}", "kind")
    if kind is Kind.EMBEDDING:
        _refuse(body, _OF_TEXTS, "makes embeddings: give `input`")
        if body.input is None:
            raise Problem("missing_field", f"model {body.model!r} makes embeddings: give input", param="input")
        return await inputs.embedding_spec(platform, model, body.input, body.dimensions)
    _refuse(body, _OF_EMBEDDINGS, "makes text: give `prompt` or `messages`")
    fit = prompts.fit(model, await _encode(platform, model, body), body.max_tokens, DEFAULT_MAX_TOKENS)
    drawn = await sampling(platform, model, body, new_seed())
    return TextSpec(fit.ids, msgspec.structs.replace(drawn, max_tokens=fit.max_tokens))


def _refuse(body: JobRequest, names: tuple[str, ...], instead: str) -> None:
    for name in names:
        if getattr(body, name) is not None:
            raise _unsupported(f"{name} is nothing for model {body.model!r}, which {instead}", name)


def _unsupported(detail: str, param: str) -> Problem:
    return Problem(UnsupportedModel.code, detail, param=param, hint=UnsupportedModel.hint)


async def _encode(platform: Platform, model: Model, body: JobRequest) -> prompts.Tokens:
    if (body.prompt is None) == (body.messages is None):
        raise Problem("invalid_parameter", "give one of prompt and messages", param="prompt")
    if body.messages is not None:
        return await prompts.encode_chat(platform, model, conversation(body.messages))
    return await prompts.encode_text(platform, model, body.prompt or "")
