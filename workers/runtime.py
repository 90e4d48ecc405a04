"""What one worker process holds: its engines, the writers to every home, its name, whether it drains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from brokers import calls, connect, names
from brokers.chunk_writer import ChunkWriter, OwnedStream
from brokers.job import Job
from brokers.models import Registry
from brokers.seal import Sealer
from brokers.settings import Settings
from workers.engines import Intent, ModelEngine, Run
from workers.later import Later

log = logging.getLogger(__name__)


class Runtime:
    """Made when the worker starts, before it consumes; `current()` finds it from a task."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        models: list[str],
        on_service: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        self.settings = settings
        self.name = name
        self.sealer = Sealer(settings)
        self.draining = threading.Event()
        self.leaving = threading.Event()  # the drain is over: nothing is waited for any more
        # A message that waits for its acknowledgement holds a place of the prefetch: a quarter may, no more.
        self.later = Later(most=max(1, settings.slots // 4))
        registry = Registry(settings.models_dir)
        self.engines = {model: ModelEngine(model, registry.get(model).folder, settings, on_service) for model in models}
        self.cards = {model: registry.get(model).card for model in models}
        self._writers: dict[str, ChunkWriter] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Check the store, then load every model. Raises what they raise."""
        self.later.start()
        with connect.blocking(self.settings, self.settings.region, timeout_s=5.0) as client:
            connect.prepare(client, self.settings)
        with ThreadPoolExecutor(max(1, len(self.engines))) as starting:  # most of it is importing torch
            list(starting.map(ModelEngine.start, self.engines.values()))

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.stop()
        for writer in self._writers.values():
            writer.close()

    def writer(self, home: str) -> ChunkWriter:
        """The writer to a home's store, opened at first use."""
        with self._lock:
            if home not in self._writers:
                self._writers[home] = ChunkWriter(
                    self.settings, home, self._cancel_asked, lambda room: self._make_room(home, room)
                )
                _Hints(self, home).start()
            return self._writers[home]

    def find(self, job_id: str) -> tuple[ModelEngine, Run] | None:
        for engine in self.engines.values():
            if run := engine.find(job_id):
                return engine, run
        return None

    def cancel(self, job_id: str) -> None:
        """End a run here whose cancel is in the record already."""
        if found := self.find(job_id):
            engine, run = found
            engine.take_out(run, Intent.CANCEL)

    def ask_cancel(self, job: Job) -> None:
        """Cancel a job as a client's cancel would, in the record first; returns at once."""
        threading.Thread(target=self._ask_cancel, args=(job,), name=f"cancel-{job.id}", daemon=True).start()

    def _ask_cancel(self, job: Job) -> None:
        call = calls.cancel(job, calls.keys(job, self.settings.partitions))
        try:
            connect.send(self.writer(job.home).client, call)
        except connect.ERRORS as error:
            log.warning("cancel of %s is not in the store: %s", job.id, type(error).__name__)
        self.cancel(job.id)

    def hand_back_all(self) -> None:
        """Give up every run; other workers go on with them in mid-stream."""
        for engine in self.engines.values():
            for run in engine.runs():
                engine.take_out(run, Intent.HAND_BACK)

    def running(self) -> int:
        return sum(len(engine.runs()) for engine in self.engines.values())

    def _make_room(self, home: str, room: bool) -> None:
        log.warning("home %s %s", home, "has caught up: going on" if room else "is behind: its sequences pause")
        for engine in self.engines.values():
            engine.make_room(self._writers[home], room=room)

    def _cancel_asked(self, stream: OwnedStream) -> None:
        self.cancel(stream.job.id)


class _Hints(threading.Thread):
    """Hears of cancels at once. A hint that is lost costs a renewal's time: the flag in the record is what counts."""

    def __init__(self, runtime: Runtime, home: str) -> None:
        super().__init__(name=f"hints-{home}", daemon=True)
        self._runtime = runtime
        self._home = home

    def run(self) -> None:
        while not self._runtime.draining.is_set():
            try:
                self._listen()
            except connect.ERRORS as error:
                log.debug("hints of %s: %s", self._home, type(error).__name__)
                self._runtime.draining.wait(1.0)

    def _listen(self) -> None:
        client = connect.blocking(self._runtime.settings, self._home, timeout_s=None)
        server = connect.one_server(client)
        with client, server.pubsub(ignore_subscribe_messages=True) as heard:  # type: ignore[no-untyped-call]
            heard.subscribe(names.hints(self._home))
            for message in heard.listen():
                self._runtime.cancel(message["data"].decode())


_installed: list[Runtime] = []  # one at most


def current() -> Runtime | None:
    """This process's runtime; None when it is no worker, or not started."""
    return _installed[0] if _installed else None


def install(runtime: Runtime | None) -> None:
    _installed[:] = [runtime] if runtime else []
