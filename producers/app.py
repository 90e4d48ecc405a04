"""The API put together: `producers.app:app` for an ASGI server, `create_app` for whoever has settings at hand."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokers.errors import LingbotError
from brokers.settings import Settings, load
from producers import documents, problems
from producers.auth import BEARER
from producers.documents import Plain
from producers.front import Front, as_problem
from producers.pages import add_docs
from producers.platform import Platform
from producers.problems import Problem
from producers.routes import dead, embeddings, events, jobs, keys, openai, operations, usage, webhooks

_PLAIN = (*jobs.PLAIN, *events.PLAIN, *openai.PLAIN, *embeddings.PLAIN)
_STRUCTS = (
    *jobs.STRUCTS,
    *events.STRUCTS,
    *openai.STRUCTS,
    *embeddings.STRUCTS,
    *keys.STRUCTS,
    *operations.STRUCTS,
    *usage.STRUCTS,
    *webhooks.STRUCTS,
)
_ABOUT = """Submit generation jobs and read their text as it comes.

Every error has a stable `code`, says what was wrong, and carries a `hint` and the `request_id` that is also in the
answer's `X-Request-Id`. A 503 carries `Retry-After`. One cursor, a count of content tokens, works as the id of events,
as `Last-Event-ID`, as `?after=` and as the id of the job's Redis stream.
"""


def create_app(settings: Settings) -> Front:
    """The API on these settings; its connections open with the server's lifespan."""
    platform = Platform(settings)
    app = FastAPI(
        title="Lingbot",
        version=_version(),
        description=_ABOUT,
        lifespan=_lifespan(platform),
        redirect_slashes=False,
        docs_url=None,  # pages.py has it
        redoc_url=None,
    )
    add_docs(app)
    app.router.routes.extend(map(_route, _PLAIN))
    secured = [Security(BEARER)]
    app.include_router(operations.router)
    for module in (jobs, openai, keys, usage, webhooks, dead):
        app.include_router(module.router, dependencies=secured)
    for kind in (Problem, LingbotError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _explain)
    app.openapi = _cached(lambda: documents.build(app, _PLAIN, _STRUCTS))  # type: ignore[method-assign]
    return Front(app, platform, _PLAIN)


def __getattr__(name: str) -> Any:
    """`app`, made when a server asks for it: importing this module reads no settings."""
    if name != "app":
        raise AttributeError(name)
    return globals().setdefault("app", create_app(load()))


def _route(plain: Plain) -> Route:
    route = Route(plain.path, plain.handler, methods=[plain.method], include_in_schema=False)
    route.methods = {plain.method}  # without the HEAD that comes with GET: it would wait for a stream's end
    return route


def _lifespan(platform: Platform) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await platform.open()
        _calm_collector()
        try:
            with _on_exit_signal(platform.say_goodbye):
                yield
        finally:
            await platform.close()

    return lifespan


def _calm_collector() -> None:
    """What the start made is never garbage, and requests make few cycles: looking for some each 700 allocations costs
    a busy process several percent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


@contextmanager
def _on_exit_signal(tell: Callable[[], None]) -> Iterator[None]:
    """Hear of the end when the signal comes. Servers tell of it only once every connection is closed, and open event
    streams, which would not close by themselves, then hold the shutdown up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}

    def hear(number: int, frame: FrameType | None) -> None:
        tell()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for sig in before:
        signal.signal(sig, hear)
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


async def _explain(request: Request, error: Exception) -> Response:
    return problems.response(_translated(error), request.scope)


def _translated(error: Exception) -> Problem:
    """FastAPI's and Starlette's own errors as ours."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return Problem("invalid_parameter", f"{param}: {first['msg']}", param=param)
    if isinstance(error, HTTPException):
        return _of_http(error)
    return as_problem(error)


def _of_http(error: HTTPException) -> Problem:
    if error.status_code == 405:
        return Problem("method_not_allowed", "this route does not take this method", headers=error.headers)
    if error.status_code == 404:
        return Problem("not_found", "there is nothing at this address")
    return Problem("invalid_parameter", str(error.detail))


def _cached(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        if not made:
            made.append(make())
        return made[0]

    return document


def _version() -> str:
    try:
        return version("lingbot")
    except PackageNotFoundError:
        return "0"
