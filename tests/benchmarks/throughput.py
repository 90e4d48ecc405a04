"""Tokens per second of the real model through the whole platform, against the same engine called directly."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from pathlib import Path

import httpx
from httpx_sse import aconnect_sse

from brokers.models import Registry
from brokers.settings import Settings
from tests.benchmarks.report import Row
from tests.platform import Platform
from workers.engine.host import EngineHost, EngineOptions
from workers.engine.protocol import Output, Request, SamplingParams

JOBS = 16
TOKENS = 96
ROUNDS = 3
PROMPT = "Tell me, in plain words, what a lighthouse is for and who looks after it."


def run(platform: Platform, model: str) -> list[Row]:
    """In turns, so that a machine that drifts does not favour one. The other's engine is down meanwhile."""
    through, direct = [], []
    for _ in range(ROUNDS):
        platform.restart("worker")
        through.append(asyncio.run(_through(platform, model)))
        platform.processes["worker"].stop(grace_s=20)
        direct.append(_direct(platform.settings, model))
    ratio = statistics.median(ours / bare for ours, bare in zip(through, direct, strict=True))
    return [
        Row(f"tokens per second, {model}, {JOBS} jobs in flight", f"{statistics.median(through):.1f}",
            f"{statistics.median(direct):.1f}", f"{ratio:.3f}x", "the same engine called directly"),
    ]  # fmt: skip


async def _through(platform: Platform, model: str) -> float:
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    async with httpx.AsyncClient(base_url=platform.base_url, headers=headers, timeout=300, trust_env=False) as client:
        await _one(client, model, 4)  # the first job of a fresh engine pays for its warm-up
        began = time.perf_counter()
        await asyncio.gather(*(_one(client, model, TOKENS) for _ in range(JOBS)))
        return JOBS * TOKENS / (time.perf_counter() - began)


async def _one(client: httpx.AsyncClient, model: str, tokens: int) -> None:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8}
    answer = await client.post("/v1/jobs", json=body)
    answer.raise_for_status()
    async with aconnect_sse(client, "GET", answer.json()["urls"]["events"]) as source:
        async for event in source.aiter_sse():
            if event.event == "end":
                return


def _direct(settings: Settings, model: str) -> float:
    found = Registry(settings.models_dir).get(model)
    prompt = found.encode(PROMPT)
    bench = _Bare(found.folder, settings)
    bench.generate(prompt, 1, 4)
    began = time.perf_counter()
    bench.generate(prompt, JOBS, TOKENS)
    seconds = time.perf_counter() - began
    bench.host.stop()
    return JOBS * TOKENS / seconds


class _Bare:
    """The engine's process with nothing around it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        options = EngineOptions(settings.slots, settings.kv_tokens, settings.threads, settings.device, settings.dtype)
        self._left = 0
        self._done = threading.Event()
        self.host = EngineHost(folder, options, self._on_outputs, lambda _: None)
        self.host.start()

    def generate(self, prompt: tuple[int, ...], jobs: int, tokens: int) -> None:
        self._left = jobs
        self._done.clear()
        for number in range(jobs):
            sampling = SamplingParams(max_tokens=tokens, temperature=0.8, seed=number, ignore_eos=True)
            self.host.submit(Request(f"{jobs}-{number}", prompt, sampling=sampling))
        if not self._done.wait(300):
            raise RuntimeError("the engine did not finish")

    def _on_outputs(self, outputs: list[Output]) -> None:
        self._left -= sum(1 for output in outputs if output.finish)
        if self._left <= 0:
            self._done.set()
