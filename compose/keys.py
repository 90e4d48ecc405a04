"""API keys made from the outside, straight in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from brokers.keys import KeyStore
from brokers.settings import Settings
from brokers.store import Store

T = TypeVar("T")


def create(settings: Settings, tenant: str, scopes: Iterable[str], name: str) -> str:
    """A new key. Raises StoreUnavailable."""

    async def create_in(keys: KeyStore) -> str:
        _, key = await keys.create(tenant, scopes, name)
        return key

    return asyncio.run(_with_keys(settings, create_in))


def known(settings: Settings, key: str) -> bool:
    """Whether the store knows this key. Raises StoreUnavailable."""

    async def known_in(keys: KeyStore) -> bool:
        return await keys.verify(key) is not None

    return asyncio.run(_with_keys(settings, known_in))


async def _with_keys(settings: Settings, use: Callable[[KeyStore], Awaitable[T]]) -> T:
    store = Store(settings)
    await store.open()
    try:
        return await use(KeyStore(settings, store))
    finally:
        await store.close()
