"""API keys: make, list, revoke. For whoever runs the platform: the scope `admin` reaches every tenant's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from brokers.keys import KeyInfo
from producers.auth import Admin, Right
from producers.bodies import decode, read
from producers.documents import BODY, answer, body_of, failures
from producers.platform import platform_of
from producers.problems import Problem
from producers.replies import reply

router = APIRouter(tags=["keys"])


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to make. `tenant` is your own when it is not given."""

    scopes: Annotated[list[Right], Meta(min_length=1, max_length=3)]
    name: Annotated[str, Meta(max_length=128)] = ""
    # Python's `$` would let a line end pass; JSON Schema has no `\Z`.
    tenant: Annotated[str, Meta(pattern=r"^[a-z0-9]{1,32}$(?!\n)")] | None = None


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    object: str = "key"
    tenant: str
    scopes: list[str]
    name: str
    created_at: float


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key just made: the only time that `key` is shown."""

    id: str
    object: str = "key"
    tenant: str
    scopes: list[str]
    name: str
    key: str


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """Keys, oldest first."""

    object: str = "list"
    data: list[KeyView]


_decoder = msgspec.json.Decoder(KeyRequest)


@router.post(
    "/v1/keys",
    status_code=201,
    openapi_extra={"requestBody": body_of(KeyRequest)},
    responses={201: answer("The key, shown once", NewKey), **failures(*BODY)},
)
async def create_key(request: Request, caller: Admin) -> Response:
    """Make a key."""
    platform = platform_of(request)
    body = decode(_decoder, await read(request, platform.settings.max_body_bytes))
    tenant = body.tenant or caller.tenant
    scopes = sorted({right.value for right in body.scopes})
    key_id, key = await platform.keys.create(tenant, scopes, body.name)
    made = NewKey(id=key_id, tenant=tenant, scopes=scopes, name=body.name, key=key)
    return reply(made, 201, {"Cache-Control": "no-store"})


@router.get("/v1/keys", responses={200: answer("The keys", KeyList), **failures("invalid_parameter")})
async def list_keys(
    request: Request, _: Admin, tenant: Annotated[str | None, Query(description="Only this tenant's")] = None
) -> Response:
    """Keys that are valid now, without their secrets."""
    found = await platform_of(request).keys.list(tenant)
    return reply(KeyList(data=[_view(info) for info in found]))


@router.delete(
    "/v1/keys/{key_id}", status_code=204, responses={204: answer("It is revoked"), **failures("key_not_found")}
)
async def revoke_key(request: Request, key_id: str, _: Admin) -> Response:
    """Revoke a key. Every API process refuses it within two seconds."""
    if not await platform_of(request).keys.revoke(key_id):
        raise Problem("key_not_found", "there is no key with this id")
    return Response(status_code=204)


def _view(info: KeyInfo) -> KeyView:
    return KeyView(
        id=info.id,
        tenant=info.tenant,
        scopes=sorted(info.scopes),
        name=info.name,
        created_at=info.created_ms / 1000,
    )


STRUCTS = (KeyRequest, NewKey, KeyView, KeyList)
