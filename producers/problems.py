"""Errors as the API tells them: one catalogue of stable codes, two shapes.

Native routes answer `application/problem+json` (RFC 9457) with `code`, `hint` and `request_id`; OpenAI's routes answer
OpenAI's shape with the same code. What an error says names fields and limits, never a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from brokers.errors import LingbotError

OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/models", "/v1/embeddings", "/v1/responses")
_RETRY_AFTER_S = 1


class Entry(msgspec.Struct, frozen=True):
    """What is always true of one code."""

    status: int
    title: str
    hint: str


_LINGBOT = {
    "unknown_model": (404, "No such model"),
    "unsupported_model": (400, "The model cannot do this"),
    "bad_prompt": (400, "The prompt cannot be rendered"),
    "job_not_found": (404, "No such job"),
    "dead_letter_not_found": (404, "No such dead letter"),
    "newer_request": (409, "This version does not know what the job asks for"),
    "stream_gone": (410, "The stream is gone"),
    "stream_gap": (410, "The stream has a gap"),
    "unavailable": (503, "Not available right now"),
    "broker_unavailable": (503, "The message broker is away"),
    "store_unavailable": (503, "The job store is away"),
    "no_queue": (503, "No queue takes this job"),
    "queue_full": (503, "The queue is full"),
    "internal_error": (500, "A fault of the platform"),
}
"""Status and title of the codes of brokers.errors; their hints come with the error."""

CATALOGUE: dict[str, Entry] = {
    "invalid_json": Entry(400, "The body is no JSON", "Send one JSON object, in UTF-8."),
    "too_deep": Entry(400, "The body is nested too deeply", "No request needs more than a few levels."),
    "invalid_text": Entry(
        400, "The text is no valid Unicode", "Send well-formed UTF-8 without lone surrogates or NUL."
    ),
    "unknown_field": Entry(400, "Unknown field", "Leave the field out or mend its name; /docs lists the fields."),
    "missing_field": Entry(400, "A field is missing", "Add the field; /docs lists the fields."),
    "invalid_parameter": Entry(400, "A value is wrong", "Give a value of the type and in the range that is named."),
    "unsupported_parameter": Entry(400, "Not supported here", "Leave the field out: it would be ignored otherwise."),
    "not_supported_yet": Entry(400, "Not supported yet", "Leave the field out."),
    "empty_prompt": Entry(400, "The prompt is empty", "Send at least one character."),
    "prompt_too_long": Entry(400, "The prompt is too long", "Send fewer characters."),
    "invalid_schema": Entry(
        400, "No text can be held to this schema", "Mend what is named, or leave out what is not supported."
    ),
    "schema_too_complex": Entry(
        400, "The schema is too large or too complex", "Fewer alternatives, properties and repetitions are cheaper."
    ),
    "context_exceeded": Entry(400, "Beyond the model's context", "Shorten the prompt or lower max_tokens."),
    "bad_cursor": Entry(400, "The cursor is wrong", "Give the id of the last event you read, a whole number from 0."),
    "missing_api_key": Entry(401, "No API key", "Send the header `Authorization: Bearer lb_...`."),
    "invalid_api_key": Entry(401, "The API key is not valid", "Check the key; it may have been revoked."),
    "missing_scope": Entry(403, "The key lacks a scope", "Use a key that has the scope, or have one made."),
    "not_found": Entry(404, "No such address", "/docs lists the routes."),
    "dead_letter_unreadable": Entry(409, "The dead letter is no job's", "Drop it; there is nothing to replay."),
    "dead_webhook_not_found": Entry(
        404, "No such webhook was given up", "GET /v1/webhooks/dead lists those there are."
    ),
    "key_not_found": Entry(404, "No such API key", "GET /v1/keys lists the ids."),
    "method_not_allowed": Entry(405, "The route does not take this method", "The Allow header names those it takes."),
    "job_cancelled": Entry(409, "The job was cancelled", "Send the request again if you still want the answer."),
    "idempotency_in_progress": Entry(
        409, "A request with this key is in progress", "Send the request again after the time in Retry-After."
    ),
    "idempotency_key_reused": Entry(
        422, "The key came with another request", "Use a new Idempotency-Key for every new request."
    ),
    "body_timeout": Entry(408, "The body came too slowly", "Send the whole body at once."),
    "body_too_large": Entry(413, "The body is too large", "Send less."),
    "head_too_large": Entry(431, "The request's head is too large", "Send fewer and shorter headers."),
    "unsupported_encoding": Entry(415, "The body is compressed", "Send it without Content-Encoding."),
    "unsupported_by_engine": Entry(
        400, "The model's engine cannot do this", "Leave the field out, or choose a model of another engine."
    ),
    "numeric_error": Entry(
        500, "The model's output is not a number", "Change the prompt or the sampling; the same again fails again."
    ),
    "generation_failed": Entry(500, "The generation failed", "Send the request again; the job's record says more."),
    "restarted": Entry(500, "The text was generated again and differs", "Send the request again."),
    "shutting_down": Entry(503, "This server is going away", "Send the request again: another one takes it."),
    "job_expired": Entry(504, "The job's deadline passed", "Try a shorter answer, or submit a job to POST /v1/jobs."),
    **{code: Entry(status, title, "") for code, (status, title) in _LINGBOT.items()},
}


class Problem(Exception):
    """A request that ends in an error; raised anywhere below a route."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        entry = CATALOGUE[code]
        self.code = code
        self.status = entry.status
        self.title = entry.title
        self.detail = detail
        self.param = param
        self.hint = hint or entry.hint
        self.headers = dict(headers or {})
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.headers.setdefault("Retry-After", str(_RETRY_AFTER_S))


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the native routes, after RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str  # stable
    hint: str
    request_id: str
    param: str | None = None  # the field at fault, as in `messages[0].role`


class OpenAIError(msgspec.Struct, frozen=True):
    """What OpenAI's clients read of an error."""

    message: str
    type: str
    param: str | None
    code: str
    hint: str
    request_id: str


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """An error on OpenAI's routes."""

    error: OpenAIError


def of(error: LingbotError) -> Problem:
    """The problem a platform error is to its client."""
    code = error.code if error.code in _LINGBOT else LingbotError.code
    detail = error.message if code == error.code else "Something went wrong inside the platform."
    return Problem(code, detail, hint=error.advice)


def internal() -> Problem:
    return Problem("internal_error", "Something went wrong inside the platform.", hint=LingbotError.hint)


def is_openai(path: str) -> bool:
    return path.startswith(OPENAI_PATHS)


def openai_body(problem: Problem, request_id: str) -> OpenAIErrorBody:
    return OpenAIErrorBody(
        OpenAIError(
            message=f"{problem.detail.rstrip('.')}. {problem.hint}",  # their clients show the message alone
            type=_openai_type(problem.status),
            param=problem.param,
            code=problem.code,
            hint=problem.hint,
            request_id=request_id,
        )
    )


def native_body(problem: Problem, request_id: str) -> ProblemBody:
    return ProblemBody(
        type=f"urn:lingbot:problem:{problem.code}",
        title=problem.title,
        status=problem.status,
        detail=problem.detail,
        code=problem.code,
        hint=problem.hint,
        request_id=request_id,
        param=problem.param,
    )


def response(problem: Problem, scope: Scope) -> Response:
    """The answer in the shape of the route that was asked."""
    request_id = scope.get("request_id", "")
    openai = is_openai(scope["path"])
    body = openai_body(problem, request_id) if openai else native_body(problem, request_id)
    media_type = "application/json" if openai else "application/problem+json"
    return Response(msgspec.json.encode(body), problem.status, problem.headers, media_type)


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "invalid_request_error" if status < 500 else "server_error"
