"""OpenAI's routes, so that an unmodified client of theirs works: chat, completions, models."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from brokers.job import Sampling, TextSpec
from brokers.keys import Principal
from brokers.models import Model
from producers import prompts
from producers.auth import Anyone, Right, authorize
from producers.bodies import decode, read
from producers.documents import BODY, PROMPT, PUBLISH, Handler, Plain, answer, body_of, failures
from producers.idempotency import KEY, ONCE, once, submit_once
from producers.limits import DEFAULT_MAX_TOKENS, OPENAI_EXPIRES_S
from producers.openai import generation
from producers.openai.replies import About, ChatCompletion, ChatShape, Completion, CompletionShape, Shape
from producers.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_messages,
    prompts_of,
    refuse_unsupported,
)
from producers.platform import Platform, platform_of
from producers.problems import Problem
from producers.replies import reply
from producers.sampling import sampling
from producers.schemas import conversation
from producers.submission import Draft, new_seed

router = APIRouter(tags=["OpenAI"])

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_COMPLETION_MAX_TOKENS = 16  # OpenAI's documented default on this route


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """A model; the fields from `kind` on are an extension."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "lingbot"
    kind: str
    max_context: int
    dimensions: int | None = None  # of an embedding model's vectors
    parameters: int | None = None
    license: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Every model served here."""

    object: str = "list"
    data: list[ModelObject]


async def create_chat_completion(request: Request) -> Response:
    platform = platform_of(request)
    principal = await authorize(request, Right.SUBMIT)
    body = decode(_chat_decoder, await read(request, platform.settings.max_body_bytes))
    refuse_unsupported(body)
    check_messages(body.messages)
    max_tokens = _max_tokens(body)
    model = prompts.text_model(platform, body.model)
    ids = await prompts.encode_chat(platform, model, conversation(body.messages))
    fit = prompts.fit(model, ids, max_tokens, DEFAULT_MAX_TOKENS)
    return await _generate(request, platform, principal, body, model, [fit])


async def create_completion(request: Request) -> Response:
    platform = platform_of(request)
    principal = await authorize(request, Right.SUBMIT)
    body = decode(_completion_decoder, await read(request, platform.settings.max_body_bytes))
    refuse_unsupported(body)
    asked = prompts_of(body)
    model = prompts.text_model(platform, body.model)
    encoded = [await _encode(platform, model, prompt) for prompt in asked]
    fits = [prompts.fit(model, ids, body.max_tokens, _COMPLETION_MAX_TOKENS) for ids in encoded]
    return await _generate(request, platform, principal, body, model, fits)


@router.get("/v1/models", responses={200: answer("The models", ModelList), **failures(openai=True)})
async def list_models(request: Request, _: Anyone) -> Response:
    """Every model served here."""
    return reply(ModelList(data=[_model_object(model) for model in platform_of(request).registry.all()]))


@router.get(
    "/v1/models/{model}",
    responses={200: answer("The model", ModelObject), **failures("unknown_model", openai=True)},
)
async def show_model(request: Request, model: str, _: Anyone) -> Response:
    """One model."""
    return reply(_model_object(platform_of(request).registry.get(model)))


async def _generate(
    request: Request,
    platform: Platform,
    principal: Principal,
    body: GenerationRequest,
    model: Model,
    fits: list[prompts.Fit],
) -> Response:
    drawn = await sampling(platform, model, body, new_seed())
    key = once(request, principal, body)
    jobs, replayed = await submit_once(platform, key, _drafts(platform, principal, body, fits, drawn))
    generated = generation.Generation(
        platform=platform,
        jobs=jobs,
        choices_per_prompt=body.n or 1,
        shape=_shape(body, jobs[0].id, jobs[0].created_ms // 1000, model),
        include_usage=body.include_usage,
        keyed=key is not None,
        replayed=replayed,
    )
    return await (generation.stream if body.stream else generation.whole)(request, generated)


def _drafts(
    platform: Platform, principal: Principal, body: GenerationRequest, fits: list[prompts.Fit], drawn: Sampling
) -> list[Draft]:
    """One a choice: prompts in order, the choices of a prompt side by side, one seed for all of them."""
    return [
        Draft(
            tenant=principal.tenant,
            model=body.model,
            lane=body.lane,
            spec=TextSpec(fit.ids, msgspec.structs.replace(drawn, max_tokens=fit.max_tokens), choice),
            expires_s=min(OPENAI_EXPIRES_S, platform.settings.max_expires_s),
        )
        for fit in fits
        for choice in range(body.n or 1)
    ]


def _max_tokens(body: ChatRequest) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Problem(
            "invalid_parameter", "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens"
        )
    return body.max_completion_tokens or body.max_tokens


async def _encode(platform: Platform, model: Model, prompt: str | list[int]) -> prompts.Tokens:
    if isinstance(prompt, str):
        return await prompts.encode_text(platform, model, prompt)
    return prompts.check_ids(model, prompt, "prompt")


def _shape(body: GenerationRequest, request_id: str, created: int, model: Model) -> Shape:
    about = About(request_id, created, body.model, None if body.alternatives is None else model.spelling)
    if isinstance(body, ChatRequest):
        return ChatShape(about, body.service_tier)
    return CompletionShape(about)


def _model_object(model: Model) -> ModelObject:
    card = model.card
    return ModelObject(
        id=card.name,
        created=card.created,
        kind=card.kind.value,
        max_context=card.max_context,
        dimensions=card.dimensions or None,
        parameters=card.parameters,
        license=card.license,
    )


def _plain(path: str, handler: Handler, name: str, request: type, response: type, about: str) -> Plain:
    operation = {
        "tags": ["OpenAI"],
        "operationId": name,
        "summary": name.replace("_", " ").title(),
        "description": f"{about} With `stream: true` the answer is a stream of chunks that ends in `data: [DONE]`; one "
        "that breaks ends in an `error` frame instead. Fields that would be ignored are refused.",
        "parameters": [KEY],
        "requestBody": body_of(request),
        "responses": {
            200: answer("The answer", response),
            **failures(
                *(*BODY, *PROMPT, *PUBLISH, *ONCE, "unsupported_parameter", "unsupported_by_engine", "job_cancelled"),
                *("generation_failed", "numeric_error", "job_expired", "shutting_down"),
                openai=True,
            ),
        },
    }
    return Plain("POST", path, handler, operation)


PLAIN = (
    _plain(
        "/v1/chat/completions",
        create_chat_completion,
        "create_chat_completion",
        ChatRequest,
        ChatCompletion,
        "Answer a conversation.",
    ),
    _plain(
        "/v1/completions",
        create_completion,
        "create_completion",
        CompletionRequest,
        Completion,
        "Continue a text.",
    ),
)
STRUCTS = (ChatRequest, ChatCompletion, CompletionRequest, Completion, ModelObject, ModelList)
