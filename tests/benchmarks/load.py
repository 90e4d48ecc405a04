"""A small HTTP load generator: keep-alive connections, each sending its next request when the last was answered.

It parses only what it needs (status and content-length), so that on two cores the server is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Load:
    """What a run saw."""

    requests: int
    seconds: float
    latencies_ms: list[float]
    failures: int

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, percent: int) -> float:
        return percentile(self.latencies_ms, percent)


def percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


async def post(
    url: str, body: Callable[[], dict[str, object]], headers: dict[str, str], *, connections: int, seconds: float
) -> Load:
    """POST JSON for a time; requests under way at its end are waited for. Anything but 200 and 202 is a failure."""
    latencies: list[float] = []
    failures = 0
    began = time.perf_counter()

    async def one_connection() -> None:
        nonlocal failures
        host = urlsplit(url)
        reader, writer = await asyncio.open_connection(host.hostname, host.port)
        while time.perf_counter() - began < seconds:
            sent = time.perf_counter()
            writer.write(_request(url, body(), headers))
            status = await _answer(reader)
            latencies.append((time.perf_counter() - sent) * 1000)
            failures += status not in {200, 202}
        writer.close()

    await asyncio.gather(*(one_connection() for _ in range(connections)))
    return Load(len(latencies) - failures, time.perf_counter() - began, latencies, failures)


def _request(url: str, body: dict[str, object], headers: dict[str, str]) -> bytes:
    target = urlsplit(url)
    payload = json.dumps(body).encode()
    fields = {"Host": target.netloc, "Content-Type": "application/json", "Content-Length": str(len(payload)), **headers}
    head = f"POST {target.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return head.encode() + b"\r\n" + payload


async def _answer(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return int(head.split(b" ", 2)[1])
