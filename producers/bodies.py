"""Request bodies: read within a size and a time, decoded strictly, refused in words that say what to change."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from producers.limits import BODY_DEADLINE_S
from producers.problems import Problem

T = TypeVar("T")

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")
_FIELD = re.compile(r"field `([^`]*)`")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises Problem: body_too_large, body_timeout, unsupported_encoding."""
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await _collect(request, max_bytes)
    except TimeoutError:
        raise Problem(
            "body_timeout",
            f"the body was not complete after {BODY_DEADLINE_S:g} seconds",
            headers={"Connection": "close"},
        ) from None


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The value in a JSON body. Raises Problem with the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error), body) from None
    except UnicodeDecodeError:
        raise Problem("invalid_text", "the body is not UTF-8") from None
    except RecursionError:
        raise Problem("too_deep", "the body has more levels than can be read") from None


def check_text(text: str, param: str) -> None:
    """Refuse what no tokenizer can mean. Raises Problem."""
    if "\0" in text:
        raise Problem("invalid_text", f"{param} holds the character U+0000", param=param)


def _check_headers(request: Request, max_bytes: int) -> None:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large(max_bytes)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Problem("unsupported_encoding", f"Content-Encoding {encoding[:40]!r} is not taken here")


async def _collect(request: Request, max_bytes: int) -> bytes:
    # Counted as it comes: a chunked body declares no length.
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def too_large(max_bytes: int) -> Problem:
    return Problem("body_too_large", f"the body has more than {max_bytes} bytes")


def _misfit(message: str) -> Problem:
    """msgspec's words, with its path taken out into `param`."""
    found = _AT.search(message)
    where = found.group(1) if found else ""
    what = message[: found.start()] if found else message
    field = _FIELD.search(what)
    if field:
        where = f"{where}.{field.group(1)}".lstrip(".")
    if what.startswith("Object contains unknown field"):
        return Problem("unknown_field", f"there is no field {where[:120]!r}", param=where[:120])
    if what.startswith("Object missing required field"):
        return Problem("missing_field", f"the field {where!r} is missing", param=where)
    return Problem("invalid_parameter", f"{where}: {what}" if where else what, param=where or None)


def _malformed(message: str, body: bytes) -> Problem:
    if "UTF-8" in message:
        return Problem("invalid_text", "the body is not UTF-8")
    # A lone surrogate at the end of a body is reported as a truncated one.
    if "surrogate" in message or ("truncated" in message and _SURROGATE.search(body)):
        return Problem("invalid_text", "the body holds half of a surrogate pair")
    return Problem("invalid_json", message)
