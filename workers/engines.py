"""The engine of one model in this worker, the runs that are in it, and its restarts.

What an engine brings goes straight to the stream of each run; the job's own thread only waits for the end. An engine
that dies is started again and its runs go on from what they had; one that keeps dying while a run makes no progress
takes that run down, not its neighbours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from brokers.chunk_writer import ChunkWriter, Outcome, OwnedStream
from brokers.job import Failure, FinishReason, State
from brokers.settings import Settings
from workers.engine.host import EngineGone, EngineHost, EngineOptions, EngineStartError
from workers.engine.protocol import Output, Request, Stats

log = logging.getLogger(__name__)

_STRIKES = 3  # engine deaths without progress of a run, after which the run fails
_RESTART_S = (0.0, 1.0, 2.0, 5.0)


class Intent(Enum):
    """Why a run was taken out of the engine before its own end."""

    CANCEL = "cancel"
    HAND_BACK = "hand_back"  # another worker goes on with it
    DROP = "drop"  # it is another worker's already


class Run:
    """One job in an engine."""

    def __init__(self, stream: OwnedStream, writer: ChunkWriter, request: Request) -> None:
        self.stream = stream
        self.writer = writer
        self.request = request
        self.intent: Intent | None = None
        self.out_of_engine = threading.Event()
        self.strikes = 0
        self.length_at_strike = -1


class ModelEngine:
    """One model's engine and its runs. Thread-safe."""

    def __init__(self, model: str, folder: Path, settings: Settings) -> None:
        self.model = model
        self._runs: dict[str, Run] = {}
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self.restarts = 0
        options = EngineOptions(
            slots=settings.slots,
            kv_tokens=settings.kv_tokens,
            threads=settings.threads,
            device=settings.device,
            dtype=settings.dtype,
        )
        self._host = EngineHost(folder, options, self._on_outputs, self._on_exit)

    def start(self) -> None:
        """Load the model. Raises EngineStartError."""
        began = time.monotonic()
        self._host.start()
        log.info("engine of %s ready in %.1f s", self.model, time.monotonic() - began)

    def stop(self) -> None:
        self._stopping.set()
        self._host.stop()

    @property
    def alive(self) -> bool:
        return self._host.alive

    def stats(self) -> Stats | None:
        return self._host.stats()

    def runs(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def find(self, job_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(job_id)

    def submit(self, run: Run) -> None:
        with self._lock:
            self._runs[run.request.seq] = run
            self._send(run)

    def take_out(self, run: Run, intent: Intent) -> None:
        """End a run early; its slot is free before the next step."""
        with self._lock:
            run.intent = run.intent or intent
        self._tell(lambda: self._host.abort(run.request.seq))

    # --- from the host's reader thread --------------------------------------------------------------------------

    def _on_outputs(self, outputs: list[Output]) -> None:
        by_writer: dict[ChunkWriter, list[tuple[OwnedStream, tuple[int, ...], tuple[str, ...], Outcome | None]]] = {}
        with self._lock:
            found = [(run, output) for output in outputs if (run := self._runs.get(output.seq))]
            for _, output in found:
                if output.finish:
                    del self._runs[output.seq]
        for run, output in found:
            outcome = _outcome(output, run.intent) if output.finish else None
            by_writer.setdefault(run.writer, []).append((run.stream, output.tokens, output.pieces, outcome))
        for writer, pushed in by_writer.items():
            writer.push(pushed)
        for run, output in found:
            if output.finish:
                run.out_of_engine.set()

    def _on_exit(self, reason: str) -> None:
        if self._stopping.is_set():
            return
        log.error("engine of %s died: %s", self.model, reason)
        self.restarts += 1
        threading.Thread(target=self._restart, name=f"restart-{self.model}", daemon=True).start()

    def _restart(self) -> None:
        for pause in (*_RESTART_S, *(_RESTART_S[-1:] * 1000)):
            if self._stopping.wait(pause):
                return
            try:
                self._host.start()
                break
            except EngineStartError as error:
                log.error("engine of %s does not start: %s", self.model, error)
        with self._lock:
            for run in list(self._runs.values()):
                self._strike(run)

    def _strike(self, run: Run) -> None:
        length = len(run.stream.token_ids)
        run.strikes = 1 if length > run.length_at_strike else run.strikes + 1
        run.length_at_strike = length
        if run.strikes < _STRIKES:
            self._send(run)
            return
        failure = Failure("engine_failed", f"The engine died {_STRIKES} times while it ran this job.")
        self._end(run, Outcome(State.FAILED, FinishReason.ERROR, failure))

    def _end(self, run: Run, outcome: Outcome) -> None:
        self._runs.pop(run.request.seq, None)
        run.writer.push([(run.stream, (), (), outcome)])
        run.out_of_engine.set()

    def _send(self, run: Run) -> None:
        output = tuple(run.stream.token_ids)
        request = Request(
            seq=run.request.seq,
            prompt=run.request.prompt,
            output=output,
            sampling=run.request.sampling,
            choice=run.request.choice,
            priority=run.request.priority,
            deadline=run.request.deadline,
        )
        self._tell(lambda: self._host.submit(request))
        if run.intent:
            self._tell(lambda: self._host.abort(run.request.seq))

    def _tell(self, say: Callable[[], None]) -> None:
        with suppress(EngineGone):  # the restart sends every run again, and takes out those that are to go
            say()


def _outcome(output: Output, intent: Intent | None) -> Outcome | None:
    """How the job ends in the store; None when it does not end here."""
    match output.finish:
        case "stop" | "length":
            return Outcome(State.SUCCEEDED, FinishReason(output.finish))
        case "expired":
            return Outcome(State.EXPIRED, FinishReason.EXPIRED)
        case "cancelled":
            return Outcome(State.CANCELLED, FinishReason.CANCELLED) if intent is Intent.CANCEL else None
        case _:
            failure = Failure(output.error_code or "engine_failed", output.error or "The engine failed.")
            return Outcome(State.FAILED, FinishReason.ERROR, failure)
