"""The engine of one model in this worker, the runs that are in it, and its restarts.

What an engine brings goes straight to the stream of each run; the job's own thread only waits for the end. An engine
that dies, or falls silent, is started again and its runs go on from what they had, suspects apart from the others
(isolation.py); one that does not start three times in a row takes this model out of the worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path

import msgspec

from brokers import calls, connect, entries
from brokers.chunk_writer import ChunkWriter, Outcome, OwnedStream, Pushed
from brokers.job import Failure, FinishReason, State
from brokers.settings import Settings
from workers.engine.host import EngineGone, EngineHost, EngineOptions, EngineStartError
from workers.engine.protocol import Ask, Capabilities, EmbedRequest, Output, Stats
from workers.isolation import PROBATION, Isolation

log = logging.getLogger(__name__)

_START_FAILURES = 3
_RESTART_S = (0.0, 1.0, 2.0)  # before each try to start again
_OUT_OF_SERVICE_S = 30.0  # between tries once the model is out
_WATCH_S = 0.5


class Intent(Enum):
    """Why a run was taken out of the engine before its own end."""

    CANCEL = "cancel"
    HAND_BACK = "hand_back"  # another worker goes on with it
    DROP = "drop"  # it is not ours any more


class Run:
    """One job in an engine."""

    def __init__(self, stream: OwnedStream, writer: ChunkWriter, request: Ask) -> None:
        self.stream = stream
        self.writer = writer
        self.request = request
        self.intent: Intent | None = None
        self.out_of_engine = threading.Event()
        self.begun = False  # in the engine's batch
        self.since_submitted = 0  # positions

    @property
    def seq(self) -> str:
        return self.request.seq


class ModelEngine:
    """One model's engine and its runs. Thread-safe.

    `on_service(False)` is called when the engine will not start, `on_service(True)` when it does again.
    """

    def __init__(self, model: str, folder: Path, settings: Settings, on_service: Callable[[str, bool], None]) -> None:
        self.model = model
        self.restarts = 0
        self.in_service = True
        self._settings = settings
        self._on_service = on_service
        self._runs: dict[str, Run] = {}
        self._isolation = Isolation()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        options = EngineOptions(
            slots=settings.slots,
            kv_tokens=settings.kv_tokens,
            threads=settings.threads,
            device=settings.device,
            dtype=settings.dtype,
            engine=settings.engine,
            prefix_tokens=settings.prefix_tokens,
            pause_grace_s=settings.pause_grace_s,
            speculation=settings.speculation,
            exact=settings.exact,
        )
        self._host = EngineHost(folder, options, self._on_outputs, self._on_exit, self._on_begin)

    def start(self) -> None:
        """Load the model. Raises EngineStartError."""
        began = time.monotonic()
        self._host.start()
        log.info("engine of %s ready in %.1f s", self.model, time.monotonic() - began)
        threading.Thread(target=self._watch, name=f"watch-{self.model}", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self._host.stop()

    @property
    def alive(self) -> bool:
        return self._host.alive

    @property
    def capabilities(self) -> Capabilities | None:
        """None before it was ready for the first time."""
        return self._host.capabilities

    def stats(self) -> Stats | None:
        return self._host.stats()

    def runs(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def find(self, job_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(job_id)

    def submit(self, run: Run, *, suspect: bool = False) -> None:
        with self._lock:
            self._runs[run.seq] = run
            self._send(self._isolation.admit(run.seq, suspect=suspect))

    def take_out(self, run: Run, intent: Intent) -> None:
        """End a run early; its slot is free before the next step."""
        with self._lock:
            run.intent = run.intent or intent
            if self._runs.get(run.seq) is run and not self._isolation.runs(run.seq):
                self._leave(run)  # it waits outside the engine
                return
        self._host.abort(run.seq)

    def make_room(self, writer: ChunkWriter, *, room: bool) -> None:
        """Pause what goes to a home whose window is full, or let it go on."""
        tell = self._host.resume if room else self._host.pause
        for run in self.runs():
            if run.writer is writer:
                tell(run.seq)

    # --- from the host's thread ---------------------------------------------------------------------------------

    def _on_begin(self, seqs: list[str]) -> None:
        by_writer: dict[ChunkWriter, list[OwnedStream]] = {}
        with self._lock:
            for run in filter(None, map(self._runs.get, seqs)):
                run.begun = True
                by_writer.setdefault(run.writer, []).append(run.stream)
        for writer, streams in by_writer.items():
            writer.begin(streams)

    def _on_outputs(self, outputs: list[Output]) -> None:
        by_writer: dict[ChunkWriter, list[Pushed]] = {}
        with self._lock:
            found = [(run, output) for output in outputs if (run := self._runs.get(output.seq))]
            for run, output in found:
                self._progress(run, output)
        for run, output in found:
            by_writer.setdefault(run.writer, []).append(_pushed(run, output))
        for writer, pushed in by_writer.items():
            writer.push(pushed)
        for run, output in found:
            if output.finish:
                run.out_of_engine.set()

    def _progress(self, run: Run, output: Output) -> None:
        on_probation = run.since_submitted < PROBATION
        run.since_submitted += len(output.tokens) + len(output.vectors)
        if output.finish:
            del self._runs[run.seq]
        if output.finish or (on_probation and run.since_submitted >= PROBATION):
            self._send(self._isolation.cleared(run.seq))

    def _on_exit(self, reason: str) -> None:
        if self._stopping.is_set():
            return
        log.error("engine of %s died: %s", self.model, reason)
        self.restarts += 1
        threading.Thread(target=self._restart, name=f"restart-{self.model}", daemon=True).start()

    # --- restarts -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Kill an engine that is stuck: a hang is a crash that nobody sees."""
        while not self._stopping.wait(_WATCH_S):
            if self._host.alive and self._host.silent_s > self._settings.engine_hang_s:
                log.error("engine of %s says nothing since %.0f s: killed", self.model, self._host.silent_s)
                self._host.kill()

    def _restart(self) -> None:
        if not self._start_again():
            return
        with self._lock:
            begun = [run.seq for run in self._runs.values() if run.begun]
            others = [run.seq for run in self._runs.values() if not run.begun and self._isolation.runs(run.seq)]
            for run in self._runs.values():
                run.begun = False
            verdict = self._isolation.crashed(begun, others)
            struck = self._runs.get(verdict.struck) if verdict.struck else None
            if struck is None:
                self._send(verdict.run)
        if struck:
            self._strike(struck)

    def _start_again(self) -> bool:
        """Until the engine is up. False when the worker stops meanwhile."""
        failures = 0
        while not self._stopping.wait(_RESTART_S[failures] if failures < _START_FAILURES else _OUT_OF_SERVICE_S):
            try:
                self._host.start()
            except EngineStartError as error:
                failures += 1
                log.error("engine of %s does not start: %s", self.model, error)
                if failures == _START_FAILURES:
                    self._serve(False)
            else:
                self._serve(True)
                return True
        return False

    def _serve(self, in_service: bool) -> None:
        if in_service == self.in_service:
            return
        self.in_service = in_service
        self._on_service(self.model, in_service)
        if not in_service:
            with self._lock:
                for run in list(self._runs.values()):
                    run.intent = run.intent or Intent.HAND_BACK
                    self._leave(run)

    def _strike(self, run: Run) -> None:
        """It was alone in the engine when that died. The store counts, so that it counts over all workers."""
        call = calls.struck(run.stream.keys, run.stream.token)
        while not self._stopping.is_set():
            try:
                verdict = connect.send(run.writer.client, call)
                break
            except connect.ERRORS as error:
                log.warning("strike of %s: store away (%s)", run.seq, type(error).__name__)
                self._stopping.wait(1.0)
        else:
            return
        with self._lock:
            if isinstance(verdict, calls.Accepted):
                self._send([run.seq])
                return
            run.stream.lost = verdict
            self._leave(run)
        run.writer.remove(run.stream)

    def _leave(self, run: Run) -> None:
        """Out of this engine without an output of its own."""
        self._runs.pop(run.seq, None)
        if run.intent is Intent.CANCEL:
            run.writer.push([Pushed(run.stream, outcome=Outcome(State.CANCELLED, FinishReason.CANCELLED))])
        run.out_of_engine.set()
        self._send(self._isolation.cleared(run.seq))

    # --- to the host --------------------------------------------------------------------------------------------

    def _send(self, seqs: Iterable[str]) -> None:
        for run in filter(None, map(self._runs.get, seqs)):
            run.since_submitted = 0
            with suppress(EngineGone):  # the restart sends every run again, and takes out those that are to go
                self._host.submit(_resumed(run))
            if run.intent:
                self._host.abort(run.seq)
            elif run.writer.full:
                self._host.pause(run.seq)


def _resumed(run: Run) -> Ask:
    """The run's request, to go on after what it has."""
    if isinstance(run.request, EmbedRequest):
        return msgspec.structs.replace(run.request, done=run.stream.pos)
    return msgspec.structs.replace(run.request, output=tuple(run.stream.token_ids))


def _pushed(run: Run, output: Output) -> Pushed:
    outcome = _outcome(output, run.intent) if output.finish else None
    logprobs = [entries.packed_logprobs(scored.logprob, scored.top) for scored in output.logprobs]
    return Pushed(run.stream, output.tokens, output.vectors or output.pieces, outcome, logprobs)


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
