"""What Prometheus reads of one API process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """Every metric of the API, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "lingbot_http_requests_total", "Requests answered", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            *("lingbot_http_request_seconds", "Time from a request's head to its answer's head", ("route",)),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._submissions = Counter(
            *("lingbot_submissions_total", "Jobs by what became of their submission", ("lane", "outcome")),
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "lingbot_prompt_tokens_total", "Prompt tokens of the jobs accepted", registry=self.registry
        )
        self.streams = Gauge("lingbot_open_streams", "Event streams being written now", registry=self.registry)
        self._workers = Gauge("lingbot_workers", "Workers of the region by state", ("state",), registry=self.registry)
        self._engine_tokens = Gauge(
            *("lingbot_engine_tokens", "Tokens since the engines of the region started, by what became of them"),
            labelnames=("model", "tokens"),
            registry=self.registry,
        )
        # Finding a child by its labels takes a lock and builds strings; the hot path asks for the same few.
        self._count = lru_cache(4096)(self._requests.labels)
        self._timer = lru_cache(1024)(self._seconds.labels)
        self._outcome = lru_cache(64)(self._submissions.labels)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._count(route, str(status)).inc()
        self._timer(route).observe(seconds)

    def submitted(self, lane: str, outcome: str, prompt_tokens: int) -> None:
        """`outcome`: queued | unconfirmed | withdrawn | unrecorded."""
        self._outcome(lane, outcome).inc()
        self._prompt_tokens.inc(prompt_tokens)

    def show_workers(self, reports: list[dict[str, Any]]) -> None:
        """What workers say of themselves, see workers/heartbeat.py. Reused tokens by those and the prefilled ones are
        the hit rate of prefixes; confirmed by guessed ones is that of guesses."""
        self._workers.clear()
        self._engine_tokens.clear()
        for report in reports:
            self._workers.labels(report["state"]).inc()
            for model, engine in report["engines"].items():
                for tokens in ("generated", "prefilled", "reused", "guessed", "confirmed"):
                    count = (engine["stats"] or {}).get(f"{tokens}_tokens", 0)
                    self._engine_tokens.labels(model, tokens).inc(count)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
