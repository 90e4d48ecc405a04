"""The HTTP client of the command: deadlines on everything, and problems turned into errors with a hint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from brokers.errors import LingbotError
from compose.cli.target import Target

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_AGAIN_S = (0.5, 2.0)
_SILENCE_S = 45.0  # an event stream sends a heartbeat every 15 s


class Unreachable(LingbotError):
    """The API cannot be reached."""

    code = "unreachable"
    hint = "Is the platform up? `lingbot up` starts it here, `lingbot doctor` looks for what is wrong."


class Refused(LingbotError):
    """The API answered with an error."""

    code = "refused"
    hint = ""

    def __init__(self, message: str, *, hint: str | None = None, status: int = 0, problem: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.problem = problem  # the API's own code


_HERE = {
    "unknown_model": "`lingbot models list` shows what is served here.",
    "unsupported_model": "Choose a model of the right kind with --model; `lingbot models list` shows them.",
    "dead_letter_not_found": "`lingbot dead list` shows those there are; `lingbot jobs` shows how a job stands.",
}
"""Hints by problem, in the words of who is at a command line instead of HTTP."""


class Client:
    """One API. Every call raises Unreachable or Refused."""

    def __init__(self, target: Target) -> None:
        headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self.url = target.url
        self._http = httpx.Client(base_url=target.url, headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params={k: v for k, v in params.items() if v is not None})

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, json=body) if body is not None else self._call("POST", path)

    def post_once(self, path: str, body: dict[str, Any]) -> Any:
        """As post, and again when the answer was lost on its way: the server makes one thing of it."""
        key = {"Idempotency-Key": secrets.token_hex(16)}
        for pause_s in _AGAIN_S:
            try:
                return self._call("POST", path, json=body, headers=key)
            except Unreachable as lost:
                if isinstance(lost.__cause__, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL):
                    raise
            time.sleep(pause_s)
        return self._call("POST", path, json=body, headers=key)

    def delete(self, path: str) -> None:
        self._call("DELETE", path)

    @contextmanager
    def stream(self, path: str, after: int) -> Iterator[httpx.Response]:
        """The open event stream of a job, from a position on."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        with self._translated(), self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield response

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._translated():
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise _refusal(response)
        return response.json() if response.content else None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise Unreachable(f"{self.url} did not answer in time") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self.url} cannot be reached: {str(error) or type(error).__name__}") from error


def _refusal(response: httpx.Response) -> Refused:
    try:
        body = response.json()
    except ValueError:
        body = {}
    problem = body.get("error", body) if isinstance(body, dict) else {}  # OpenAI's routes wrap it
    message = problem.get("detail") or problem.get("message") or f"HTTP status {response.status_code}"
    hint = problem.get("hint")
    if hint:
        message = message.removesuffix(f" {hint}")  # OpenAI's clients show the message alone, so it ends with the hint
    if wait := response.headers.get("retry-after"):
        message += f" (try again in {wait} s)"
    code = str(problem.get("code", ""))
    return Refused(message, hint=_HERE.get(code, hint), status=response.status_code, problem=code)
