"""What the platform adds to the first token on an idle machine: HTTP in to first SSE event out, against the engine
called directly with the same request in the same run."""

from __future__ import annotations

import time
from pathlib import Path
from queue import SimpleQueue

import httpx

from tests.benchmarks.load import percentile
from tests.benchmarks.report import Row
from tests.platform import Platform
from workers.engine.host import EngineHost, EngineOptions
from workers.engine.protocol import Output, Request, SamplingParams

TRIES = 300
WARM_UP = 20


def run(platform: Platform) -> list[Row]:
    through = _through(platform)
    direct = _direct(platform.settings.models_dir / platform.model)
    added = [percentile(through, percent) - percentile(direct, percent) for percent in (50, 99)]
    return [
        Row("time to first token, idle, scripted engine: p50 / p99",
            f"{percentile(through, 50):.1f} / {percentile(through, 99):.1f} ms",
            f"{percentile(direct, 50):.1f} / {percentile(direct, 99):.1f} ms",
            f"adds {added[0]:.1f} / {added[1]:.1f} ms", "the engine's process called directly"),
    ]  # fmt: skip


def _through(platform: Platform) -> list[float]:
    body = {"model": platform.model, "prompt": "hello", "max_tokens": 4, "stream": True}
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    times = []
    with httpx.Client(base_url=platform.base_url, headers=headers, timeout=10, trust_env=False) as client:
        for _ in range(TRIES + WARM_UP):
            began = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as answer:
                events = (line for line in answer.iter_lines() if line.startswith("data:"))
                next(events)
                times.append((time.perf_counter() - began) * 1000)
                for _ in events:  # to its end, so that the next one finds the machine idle
                    pass
            time.sleep(0.01)  # idle in between
    return times[WARM_UP:]


def _direct(folder: Path) -> list[float]:
    arrived: SimpleQueue[list[Output]] = SimpleQueue()
    host = EngineHost(folder, EngineOptions(16, 32_768, 1, "cpu", "float32"), arrived.put, lambda _: None)
    host.start()
    times = []
    for number in range(TRIES + WARM_UP):
        began = time.perf_counter()
        host.submit(Request(str(number), (104, 101, 108, 108, 111), sampling=SamplingParams(max_tokens=4)))
        _await_tokens(arrived)
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.01)
    host.stop()
    return times[WARM_UP:]


def _await_tokens(arrived: SimpleQueue[list[Output]]) -> None:
    while not any(output.tokens for output in arrived.get(timeout=10)):
        pass
