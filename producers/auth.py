"""Who is asking, and may they: bearer keys and their scopes."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.requests import Request

from brokers.keys import Principal
from producers.platform import platform_of
from producers.problems import Problem

# Keys look like this, so that nothing else costs a look into the store.
_KEY = re.compile(r"lb_[a-z0-9]{1,32}_[A-Za-z0-9]{16,128}\Z")
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="lingbot"'}

BEARER = HTTPBearer(auto_error=False, scheme_name="key", description="An API key, `lb_<tenant>_<secret>`.")
"""For the document alone; `authenticate` reads the header."""


class Right(StrEnum):
    """What a key may be good for; none implies another."""

    SUBMIT = "submit"  # create jobs, cancel them, wait for their text
    READ = "read"  # see jobs and their text
    ADMIN = "admin"  # keys and the platform's state: for whoever runs it


async def authenticate(request: Request) -> Principal:
    """The owner of the request's key. Raises Problem (401) or StoreUnavailable."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Problem("missing_api_key", "the request carries no API key", headers=_CHALLENGE)
    principal = await platform_of(request).keys.verify(key) if _KEY.match(key) else None
    if principal is None:
        challenge = {"WWW-Authenticate": _CHALLENGE["WWW-Authenticate"] + ', error="invalid_token"'}
        raise Problem("invalid_api_key", "this API key is not known here", headers=challenge)
    return principal


async def authorize(request: Request, right: Right) -> Principal:
    """As authenticate, and the key has the scope. Raises Problem (401, 403)."""
    principal = await authenticate(request)
    if right not in principal.scopes:
        raise Problem("missing_scope", f"this needs a key with the scope {right.value!r}")
    return principal


async def _submitter(request: Request) -> Principal:
    return await authorize(request, Right.SUBMIT)


async def _reader(request: Request) -> Principal:
    return await authorize(request, Right.READ)


async def _admin(request: Request) -> Principal:
    return await authorize(request, Right.ADMIN)


Anyone = Annotated[Principal, Depends(authenticate)]
Submitter = Annotated[Principal, Depends(_submitter)]
Reader = Annotated[Principal, Depends(_reader)]
Admin = Annotated[Principal, Depends(_admin)]
