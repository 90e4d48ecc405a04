"""OpenAI's embeddings, so that an unmodified client of theirs works: one job for all the inputs of a request."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from brokers.job import Lane
from producers import inputs
from producers.auth import Right, authorize
from producers.bodies import decode, read
from producers.documents import BODY, PROMPT, PUBLISH, Plain, answer, body_of, failures
from producers.idempotency import KEY, ONCE, once, submit_once
from producers.limits import OPENAI_EXPIRES_S
from producers.openai.embeddings import EmbeddingList, EmbeddingRequest, embeddings
from producers.openai.waiting import Waiting
from producers.platform import platform_of
from producers.replies import reply
from producers.submission import Draft

_decoder = msgspec.json.Decoder(EmbeddingRequest)


async def create_embedding(request: Request) -> Response:
    platform = platform_of(request)
    principal = await authorize(request, Right.SUBMIT)
    body = decode(_decoder, await read(request, platform.settings.max_embedding_body_bytes))
    model = inputs.embedding_model(platform, body.model)
    draft = Draft(
        tenant=principal.tenant,
        model=model.card.name,
        lane=Lane.INTERACTIVE,
        spec=await inputs.embedding_spec(platform, model, body.input, body.dimensions),
        expires_s=min(OPENAI_EXPIRES_S, platform.settings.max_expires_s),
    )
    key = once(request, principal, body)
    jobs, replayed = await submit_once(platform, key, [draft])
    waiting = Waiting(platform=platform, jobs=jobs, keyed=key is not None, replayed=replayed)
    return reply(await waiting.result(request, embeddings(waiting, body)), headers=waiting.headers)


PLAIN = (
    Plain(
        "POST",
        "/v1/embeddings",
        create_embedding,
        {
            "tags": ["OpenAI"],
            "operationId": "create_embedding",
            "summary": "Create Embedding",
            "description": "Vectors of inputs, in their order. `input` is a text, texts, token ids, or lists of token "
            "ids; ids are taken as the model reads them, special ones included. Nothing is truncated: an input that is "
            "too long is refused. Fields that would be ignored are refused.",
            "parameters": [KEY],
            "requestBody": body_of(EmbeddingRequest),
            "responses": {
                200: answer("The embeddings", EmbeddingList),
                **failures(
                    *(*BODY, *PROMPT, *PUBLISH, *ONCE, "job_cancelled", "generation_failed", "job_expired"),
                    *("shutting_down", "stream_gone", "stream_gap"),
                    openai=True,
                ),
            },
        },
    ),
)
STRUCTS = (EmbeddingRequest, EmbeddingList)
