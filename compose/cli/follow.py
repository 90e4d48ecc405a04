"""Following a job's event stream to its end, over as many connections as it takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from httpx_sse import EventSource

from compose.cli.client import Client, Refused, Unreachable
from compose.cli.paths import path

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_PATIENCE_S = 120.0  # without a single event or connection


class Event(NamedTuple):
    """One event: `kind` is token, progress, error or end."""

    kind: str
    position: int
    data: dict[str, Any]


def follow(client: Client, job_id: str, after: int, on_pause: Callable[[str], None]) -> Iterator[Event]:
    """Every event after a position, each once, up to and including `end`.

    A connection that breaks is opened again at the last position. `on_pause` is told why, once an outage.
    Raises Refused when the stream cannot be read, Unreachable when the API stays away for two minutes.
    """
    position, pause_s, lost_at = after, _FIRST_PAUSE_S, None  # lost_at: of an outage that on_pause was told of
    while True:
        try:
            for event in _connection(client, job_id, position):
                position, pause_s, lost_at = event.position, _FIRST_PAUSE_S, None
                yield event
                if event.kind == "end":
                    return
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status < 500:
                raise
            if lost_at is None:
                lost_at = time.monotonic()
                on_pause(error.message)
            elif time.monotonic() - lost_at > _PATIENCE_S:
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _connection(client: Client, job_id: str, position: int) -> Iterator[Event]:
    with client.stream(path("jobs", job_id, "events"), position) as response:
        for raw in EventSource(response).iter_sse():
            if not raw.data:  # a frame that only says how soon to reconnect
                continue
            if raw.id:
                position = int(raw.id)
            yield Event(raw.event, position, json.loads(raw.data))
