"""The state of one region in one answer: queues, workers, live jobs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from brokers import calls, management, names
from brokers.errors import BrokerUnavailable
from brokers.settings import Settings
from brokers.store import Store

SILENT_MS = 10_000
"""A worker that said nothing for this long is taken for gone."""


async def status(settings: Settings, store: Store) -> dict[str, Any]:
    """What `lingbot status` shows. Parts that cannot be asked are null, with the reason under "faults"."""
    faults: list[str] = []
    queues, reports, live = await asyncio.gather(_queues(settings, faults), workers(settings, store), _live(store))
    return {"region": settings.region, "queues": queues, "workers": reports, "live_jobs": live, "faults": faults}


async def _queues(settings: Settings, faults: list[str]) -> list[dict[str, Any]] | None:
    try:
        found = await management.queues(settings, settings.region)
        return [_queue(settings.region, raw) for raw in found if raw["name"].startswith("gen.")]
    except BrokerUnavailable as error:
        faults.append(error.message)
        return None


def _queue(region: str, raw: dict[str, Any]) -> dict[str, Any]:
    lane = names.lane_of(raw["name"])
    prefix = f"gen.{region}."
    stats = raw.get("message_stats", {})
    return {
        "name": raw["name"],
        "model": raw["name"].removeprefix(prefix).removesuffix(f".{lane}") if lane else None,
        "lane": lane,
        "ready": raw.get("messages_ready", 0),
        "unacked": raw.get("messages_unacknowledged", 0),
        "consumers": raw.get("consumers", 0),
        "publish_rate": stats.get("publish_details", {}).get("rate", 0.0),
        "deliver_rate": stats.get("deliver_get_details", {}).get("rate", 0.0),
    }


async def workers(settings: Settings, store: Store) -> list[dict[str, Any]]:
    """What each worker of the region last said of itself; those that fell silent are left out."""
    command = ("HVALS", names.workers(settings.region))
    reports = await store.call(calls.Call(command, lambda reply: [msgspec.json.decode(raw) for raw in reply]))
    oldest_ms = time.time() * 1000 - SILENT_MS
    return sorted((r for r in reports if r["at_ms"] >= oldest_ms), key=lambda report: report["name"])


async def _live(store: Store) -> int:
    counts = await asyncio.gather(*(store.call(calls.Call(("ZCARD", key), int)) for key in store.live_keys()))
    return sum(counts)
