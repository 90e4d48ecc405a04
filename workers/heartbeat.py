"""What a worker says of itself, each second, to its own region: for `lingbot status`, readiness and routing."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress

import msgspec
import psutil

from brokers import calls, connect, names
from workers.runtime import Runtime

log = logging.getLogger(__name__)

_EVERY_S = 1.0


class Heartbeat(threading.Thread):
    def __init__(self, runtime: Runtime, pid: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._runtime = runtime
        self._pid = pid
        self._stopped = threading.Event()
        self._told = False
        settings = runtime.settings
        self._key = names.workers(settings.region)
        self._client = connect.blocking(settings, settings.region, timeout_s=settings.store_timeout_s)

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._send("HSET", self._runtime.name, msgspec.json.encode(self._report()))
            except connect.ERRORS as error:
                log.debug("heartbeat: %s", type(error).__name__)
            self._watch_memory()
            self._stopped.wait(_EVERY_S)

    def stop(self) -> None:
        self._stopped.set()
        self.join(timeout=2)
        with suppress(*connect.ERRORS):  # readers drop what is old
            self._send("HDEL", self._runtime.name)
        self._client.close()

    def _send(self, verb: str, *args: str | bytes) -> None:
        connect.send(self._client, calls.Call((verb, self._key, *args), bool))

    def _watch_memory(self) -> None:
        """A process that grew beyond its limit drains, as at SIGTERM; whoever supervises it starts a fresh one."""
        limit = self._runtime.settings.max_rss_mb
        rss = psutil.Process().memory_info().rss >> 20
        if limit and rss > limit and not self._runtime.draining.is_set() and not self._told:
            log.warning("this worker uses %d MB, more than max_rss_mb = %d: draining", rss, limit)
            self._told = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _report(self) -> dict[str, object]:
        return {
            "name": self._runtime.name,
            "pid": self._pid,
            "region": self._runtime.settings.region,
            "state": self._state(),
            "at_ms": int(time.time() * 1000),
            "device": self._runtime.settings.device,
            "engines": {
                model: {
                    "alive": engine.alive,
                    "restarts": engine.restarts,
                    "exact": engine.exact,
                    "stats": engine.stats(),
                }
                for model, engine in self._runtime.engines.items()
            },
        }

    def _state(self) -> str:
        if self._runtime.draining.is_set():
            return "draining"
        engines = self._runtime.engines.values()
        if not all(engine.in_service for engine in engines):
            return "out_of_service"
        return "ready" if all(engine.alive for engine in engines) else "engine_down"
