"""When a job starts and until when it may take, from what its request says."""

from __future__ import annotations

from datetime import datetime

from brokers.settings import Settings
from producers.problems import Problem
from producers.schemas import JobRequest


def start_ms(settings: Settings, body: JobRequest, now_s: float) -> int | None:
    """Unix ms of the start; None is at once, as is a time that has passed. Raises Problem."""
    if body.start_at is not None and body.delay is not None:
        raise Problem("invalid_parameter", "give one of start_at and delay", param="delay")
    name, start_s = _start_s(body, now_s)
    if start_s - now_s > settings.max_delay_s:
        raise Problem("invalid_parameter", f"{name}: at most {settings.max_delay_s} seconds from now", param=name)
    return int(start_s * 1000) if start_s > now_s else None


def expires_s(settings: Settings, body: JobRequest) -> int:
    """Seconds from its start until it expires. Raises Problem."""
    most = settings.max_expires_s
    if body.expires_in is not None and body.expires_in > most:
        raise Problem("invalid_parameter", f"expires_in: at most {most} seconds", param="expires_in")
    return body.expires_in or settings.expires_s(body.lane)


def _start_s(body: JobRequest, now_s: float) -> tuple[str, float]:
    if body.delay is not None:
        return "delay", now_s + body.delay
    if isinstance(body.start_at, datetime):
        return "start_at", body.start_at.timestamp()
    return "start_at", now_s if body.start_at is None else body.start_at
