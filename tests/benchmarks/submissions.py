"""Confirmed submissions per second of one API process, against the usual way, in turns in one run."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

import httpx
import psutil

from compose import commands
from compose.servers import Process
from tests.benchmarks.load import Load, post
from tests.benchmarks.report import Row
from tests.platform import Platform

CONNECTIONS = 64
SECONDS = 6.0
ROUNDS = 3
PROMPT = "Write three sentences about the sea, a lamp, and an echo. " * 2


def run(platform: Platform, port: int, state: Path) -> list[Row]:
    """The worker rests meanwhile: only getting jobs into the queue is measured."""
    platform.processes["worker"].stop(grace_s=10)
    usual = _usual_way(platform, port, state)
    try:
        ours, theirs = _in_turns(platform, port)
        memory_mb = psutil.Process(platform.processes["api"].pid).memory_info().rss / 1e6
    finally:
        usual.stop(grace_s=5)
    ratio = statistics.median(a.per_second / b.per_second for a, b in zip(ours, theirs, strict=True))
    our, their = _median(ours), _median(theirs)
    return [
        Row("confirmed submissions, 64 connections", f"{our.per_second:,.0f}/s", f"{their.per_second:,.0f}/s",
            f"{ratio:.2f}x", "FastAPI + apply_async with confirm_publish"),
        Row("their latency p50 / p99", f"{our.percentile_ms(50):.1f} / {our.percentile_ms(99):.1f} ms",
            f"{their.percentile_ms(50):.1f} / {their.percentile_ms(99):.1f} ms", "", "the same"),
        Row("memory of the API process afterwards", f"{memory_mb:.0f} MB", "", "", "no torch in it"),
    ]  # fmt: skip


def _in_turns(platform: Platform, port: int) -> tuple[list[Load], list[Load]]:
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(asyncio.run(_ours(platform)))
        theirs.append(asyncio.run(_theirs(port)))
    failures = sum(load.failures for load in [*ours, *theirs])
    if failures:
        raise RuntimeError(f"{failures} requests failed: the figures would mean nothing")
    return ours, theirs


async def _ours(platform: Platform) -> Load:
    body = {"model": platform.model, "prompt": PROMPT, "max_tokens": 64, "temperature": 0.8}
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    url = f"{platform.base_url}/v1/jobs"
    return await post(url, lambda: body, headers, connections=CONNECTIONS, seconds=SECONDS)


async def _theirs(port: int) -> Load:
    body = {"model": "scripted", "prompt": PROMPT, "max_tokens": 64, "temperature": 0.8}
    url = f"http://127.0.0.1:{port}/jobs"
    return await post(url, lambda: body, {}, connections=CONNECTIONS, seconds=SECONDS)


def _median(loads: list[Load]) -> Load:
    return sorted(loads, key=lambda load: load.per_second)[len(loads) // 2]


def _usual_way(platform: Platform, port: int, state: Path) -> Process:
    options = ["--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
    process = Process(
        "usual-way",
        [sys.executable, "-m", "uvicorn", "tests.benchmarks.usual_way:app", *options],
        env=commands.environment(state / "lingbot.toml"),
        log=state / "logs" / "usual-way.log",
        pid_file=state / "run" / "usual-way.pid",
    )
    process.spawn()
    _wait_for(f"http://127.0.0.1:{port}/docs", process)
    return process


def _wait_for(url: str, process: Process) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=1).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer:\n{process.tail(20)}")
