"""The outermost layer: every request gets an id, a measure, and an answer in the documented shape.

It also is the express lane: hot routes go straight to their handlers, past FastAPI's middleware and routing.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from brokers.errors import LingbotError
from producers import problems
from producers.attendance import ReaderGone
from producers.documents import Handler, Plain
from producers.platform import Platform
from producers.problems import Problem

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class Front:
    """An ASGI application around a FastAPI one."""

    def __init__(self, inner: FastAPI, platform: Platform, plain: Iterable[Plain]) -> None:
        self.inner = inner
        self.platform = platform
        self._express: dict[tuple[str, str], Handler] = {
            (route.method, route.path): route.handler for route in plain if "{" not in route.path
        }
        self._paths = {route.handler: route.path for route in plain}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        scope["platform"] = self.platform
        scope["request_id"] = request_id = _request_id(scope)
        exchange = _Exchange(send, request_id)
        try:
            await self._handle(scope, receive, exchange.send)
        except (ReaderGone, ClientDisconnect):
            pass  # nobody is there to be answered
        except Exception as error:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            await self._fail(error, scope, receive, exchange)
        self.platform.metrics.answered(self._route(scope), exchange.status, exchange.seconds)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._express.get((scope["method"], scope["path"]))
        if handler is None:
            await self.inner(scope, receive, send)
            return
        scope["express"] = True
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        problem = as_problem(error)
        if problem.code == LingbotError.code:
            log.error("request %s failed", exchange.request_id, exc_info=error)
        if exchange.complete:
            return
        if exchange.status:
            raise error  # the head is out: all that is left is to break the connection, so that it looks broken
        await problems.response(problem, scope)(scope, receive, exchange.send)

    def _route(self, scope: Scope) -> str:
        """The route's template: a path with ids in it would make a time series each."""
        if "express" in scope:
            return str(scope["path"])
        if route := scope.get("route"):
            return str(route.path)
        return self._paths.get(scope.get("endpoint"), "other")  # type: ignore[arg-type]


class _Exchange:
    """The sending side of one request."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0  # until the head is sent
        self.complete = False
        self.seconds = 0.0
        self._send = send
        self._started = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.seconds = time.perf_counter() - self._started
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode())]
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)


def as_problem(error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    return problems.of(error) if isinstance(error, LingbotError) else problems.internal()


def _request_id(scope: Scope) -> str:
    """The caller's id when it is a plain word, so that a request can be followed through; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.match(value):
            return str(value, "ascii")
    return secrets.token_hex(12)
