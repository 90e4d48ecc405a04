"""API keys `lb_<tenant>_<secret>`, kept as SHA-256 of the whole key: the secret has 160 random bits, so a slow
password hash would add nothing but latency."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable

import msgspec

from brokers import calls, names
from brokers.job import WORD
from brokers.settings import Settings
from brokers.store import Store

SCOPES = frozenset({"submit", "read", "admin"})
_CACHE_S = 2.0  # a revoked key works this long at most
_CACHE_SIZE = 10_000


class Principal(msgspec.Struct, frozen=True):
    """Who is asking."""

    tenant: str
    scopes: frozenset[str]
    key_id: str


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key; the key itself is not."""

    id: str
    tenant: str
    scopes: frozenset[str]
    name: str
    created_ms: int


class KeyStore:
    """Keys of one region."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._key = names.api_keys(settings.region)
        self._store = store
        self._cache: dict[str, tuple[float, Principal | None]] = {}

    async def verify(self, key: str) -> Principal | None:
        """Whose key this is; None when it is nobody's."""
        digest = _digest(key)
        known = self._cache.get(digest)
        if known and known[0] > time.monotonic():
            return known[1]
        info: KeyInfo | None = await self._store.call(calls.Call(("HGET", self._key, digest), _info))
        principal = Principal(info.tenant, info.scopes, info.id) if info else None
        if len(self._cache) >= _CACHE_SIZE:
            self._cache.clear()
        self._cache[digest] = (time.monotonic() + _CACHE_S, principal)
        return principal

    async def create(self, tenant: str, scopes: Iterable[str], name: str = "") -> tuple[str, str]:
        """A new key: its id, and the key itself, which nobody can read again. ValueError on a bad tenant or scope."""
        granted = frozenset(scopes)
        if not WORD.match(tenant):
            raise ValueError("a tenant is one word of a-z and 0-9, at most 32 characters")
        if not granted or granted - SCOPES:
            raise ValueError(f"scopes are some of {', '.join(sorted(SCOPES))}")
        key = f"lb_{tenant}_{secrets.token_hex(20)}"
        digest = _digest(key)
        info = KeyInfo(id=digest[:12], tenant=tenant, scopes=granted, name=name, created_ms=int(time.time() * 1000))
        await self._store.call(calls.Call(("HSET", self._key, digest, msgspec.json.encode(info)), _ignored))
        return info.id, key

    async def list(self, tenant: str | None = None) -> list[KeyInfo]:
        found = await self._store.call(calls.Call(("HVALS", self._key), lambda reply: [_info(raw) for raw in reply]))
        return sorted((i for i in found if tenant in (None, i.tenant)), key=lambda info: info.created_ms)

    async def revoke(self, key_id: str) -> bool:
        """True when there was such a key."""
        digests = await self._store.call(calls.Call(("HKEYS", self._key), lambda reply: [d.decode() for d in reply]))
        found = [digest for digest in digests if digest[:12] == key_id]
        if found:
            await self._store.call(calls.Call(("HDEL", self._key, *found), _ignored))
        for digest in found:
            self._cache.pop(digest, None)
        return bool(found)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _info(raw: bytes | None) -> KeyInfo | None:
    return msgspec.json.decode(raw, type=KeyInfo) if raw else None


def _ignored(reply: object) -> object:
    return reply
