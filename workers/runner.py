"""One job's message, from delivery to acknowledgement.

    adopt or claim -> read what is out already -> submit -> wait -> the end is in the store -> acknowledge

A message is acknowledged when its job has ended, belongs to somebody else, or is of an older publish generation. It
goes back to the queue only when this worker gives the job up in order, and slowly when it cannot read it.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from brokers import calls, connect, entries
from brokers.chunk_writer import ChunkWriter, Outcome, OwnedStream, Pushed, VectorStream
from brokers.envelope import Envelope
from brokers.errors import NewerRequest, SealBroken, UnknownSealKey
from brokers.job import Content, Failure, FinishReason, Job, Kind, Lane, Sampling, Spec, State, TextSpec
from brokers.seal import first_generation
from workers.engine.protocol import Ask, EmbedRequest, Request, SamplingParams
from workers.engines import Intent, ModelEngine, Run
from workers.runtime import Runtime

log = logging.getLogger(__name__)

_STORE_RETRY_S = 1.0
_LOOK_S = 0.25  # how often a thread that waits for its job looks around
_UNREADABLE_S = 1.0  # how long a message is held that this worker has no key for, or is too old to read
_BUSY_S = 0.5  # how often a claimer looks whether the owner is still there
_PRIORITY = {Lane.INTERACTIVE: 0, Lane.STANDARD: 1, Lane.BATCH: 2}


class HandedBackError(Exception):
    """The job is to be run by another worker: the message goes back to its queue."""


class PoisonError(Exception):
    """Workers died over the job too often: its message goes to the dead-letter queue."""


class JobFailedError(Exception):
    """The job ended failed; the store and the stream say why."""


class Runner:
    """Runs jobs in one worker process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def run(self, envelope: Envelope) -> str:
        """Run a message's job to its end; the state it ended in, or why there was nothing to do.

        Raises HandedBackError when the worker drains, PoisonError when the job was given up, JobFailedError when it
        ended failed.
        """
        engine = self._runtime.engines.get(envelope.model)
        if engine and not engine.in_service:
            raise HandedBackError
        if found := self._runtime.find(envelope.job):
            adopted = self._wait(*found)  # delivered again after a lost connection: nothing starts anew
            if found[1].stream.lost is None:
                return adopted
            if not found[1].out_of_engine.is_set():  # the engine hangs: it would take the same sequence twice
                raise HandedBackError
            # The run was not ours any more, and this message may be the one that its job was published again with.
        self._require_readable(envelope)
        return self._run(envelope)

    def _require_readable(self, envelope: Envelope) -> None:
        """While keys or versions are replaced one worker may read what another cannot yet, and is to run it. Past its
        deadline nobody needs to."""
        if time.time() * 1000 >= envelope.deadline_ms:
            return
        try:
            self._runtime.sealer.open(envelope.to_job(), envelope.sealed_spec())
        except SealBroken:
            return  # its record may still hold what was asked for
        except (UnknownSealKey, NewerRequest) as error:
            log.error("job %s: %s; handed back. %s", envelope.job, error.message.rstrip("."), error.advice)
        else:
            return
        self._runtime.draining.wait(_UNREADABLE_S)
        raise HandedBackError

    def _run(self, envelope: Envelope) -> str:
        job = envelope.to_job()
        writer = self._runtime.writer(job.home)
        token = secrets.token_hex(8)
        claimed = self._claim(job, writer, token)
        if isinstance(claimed, calls.Gone) and self._rebuild(envelope, job, writer):
            claimed = self._claim(job, writer, token)
        if isinstance(claimed, calls.Poison):
            raise PoisonError
        if not isinstance(claimed, calls.Claimed):
            return _nothing_to_do(claimed)
        keys, settings = calls.keys(job, self._runtime.settings.partitions), self._runtime.settings
        remake = calls.create(job, claimed.sealed, keys, settings)
        stream = (VectorStream if job.kind is Kind.EMBEDDING else OwnedStream)(job, keys, token, remake)
        return self._generate(stream, writer, claimed)

    # --- claiming ---------------------------------------------------------------------------------------------

    def _claim(self, job: Job, writer: ChunkWriter, token: str) -> calls.Claim:
        """Ask until the job is ours, over, or not ours to run. A store that is away is waited for."""
        settings = self._runtime.settings
        keys = calls.keys(job, settings.partitions)
        call = calls.claim(job, keys, worker=self._runtime.name, token=token, lease_ms=settings.lease_ms)
        while True:
            claim: calls.Claim = self._ask_until_answered(writer, call)
            if not isinstance(claim, calls.Busy):
                return claim
            time.sleep(min(claim.left_ms / 1000 + 0.01, _BUSY_S))

    def _ask_until_answered(self, writer: ChunkWriter, call: calls.Call) -> Any:
        """Raises HandedBackError when the worker drains meanwhile."""
        while not self._runtime.draining.is_set():
            try:
                return connect.send(writer.client, call)
            except connect.ERRORS as error:
                log.warning("%s: store away (%s)", call.command[1], type(error).__name__)
                time.sleep(_STORE_RETRY_S)
        raise HandedBackError

    def _rebuild(self, envelope: Envelope, job: Job, writer: ChunkWriter) -> bool:
        """Write the record again that the store lost, from the message. An erased job has a tombstone instead, and one
        past its deadline is over."""
        if time.time() * 1000 >= job.deadline_ms:
            return False
        sealer, settings = self._runtime.sealer, self._runtime.settings
        try:
            sealed = sealer.reseal(job, envelope.sealed_spec(), gen=1)
        except (SealBroken, UnknownSealKey) as error:
            log.error("job %s: its record is lost and its message does not open: %s", job.id, error.message)
            return False
        log.warning("job %s: the store has no record of it; rebuilt from its message", job.id)
        keys = calls.keys(job, settings.partitions)
        self._ask_until_answered(writer, calls.create(job, sealed, keys, settings))
        return True

    # --- generating -------------------------------------------------------------------------------------------

    def _generate(self, stream: OwnedStream, writer: ChunkWriter, claimed: calls.Claimed) -> str:
        writer.add(stream)  # its lease is renewed from here on
        engine = self._runtime.engines.get(stream.job.model)
        refusal = self._refusal(stream.job)
        request = None
        if engine and refusal is None:
            try:
                request, refusal = self._prepare(stream, writer, claimed)
            except HandedBackError:
                writer.remove(stream)
                raise
        if engine is None or request is None:
            writer.push([Pushed(stream, outcome=Outcome(State.FAILED, FinishReason.ERROR, refusal))])
            while not stream.settled.wait(_LOOK_S):
                self._leave_if_asked(stream, writer)
            return self._report(stream)
        run = Run(stream, writer, request)
        engine.submit(run, suspect=claimed.suspect)
        return self._wait(engine, run)

    def _refusal(self, job: Job) -> Failure | None:
        card = self._runtime.cards.get(job.model)
        if card is None:
            return Failure("unknown_model", "This worker does not serve the job's model.")
        if card.kind is not job.kind:
            return Failure("unsupported_model", f"The job's model is of kind {card.kind}, the job of kind {job.kind}.")
        return None

    def _prepare(
        self, stream: OwnedStream, writer: ChunkWriter, claimed: calls.Claimed
    ) -> tuple[Ask | None, Failure | None]:
        job = stream.job
        try:
            spec = self._runtime.sealer.open(first_generation(job), claimed.sealed)
            if claimed.pos:
                _restore(stream, self._ask_until_answered(writer, calls.entries_of(stream.keys)), claimed.pos)
        except (SealBroken, UnknownSealKey) as error:
            log.error("job %s: %s", job.id, error.message)
            return None, Failure(error.code, "The job's sealed request cannot be opened.")
        except NewerRequest as error:
            log.error("job %s: %s %s", job.id, error.message, error.advice)
            return None, Failure(
                error.code, "The job asks for what this worker does not know: it is of an older version."
            )
        except LostContentError:
            return None, Failure("stream_lost", "What was delivered is no longer in the store.")
        return _request(job, spec), None

    def _wait(self, engine: ModelEngine, run: Run) -> str:
        """Until the run has ended in the store, or is no longer ours."""
        stream = run.stream
        while not stream.settled.wait(_LOOK_S):
            self._leave_if_asked(stream, run.writer)
            if run.out_of_engine.is_set() and run.intent is Intent.HAND_BACK and stream.outcome is None:
                self._release(run)
        if stream.lost is not None:
            engine.take_out(run, Intent.DROP)
            run.out_of_engine.wait(timeout=5)
        return self._report(stream)

    def _leave_if_asked(self, stream: OwnedStream, writer: ChunkWriter) -> None:
        """What cannot be written before this worker ends, another one generates again when the lease has run out."""
        if self._runtime.leaving.is_set():
            writer.remove(stream)
            raise HandedBackError

    def _release(self, run: Run) -> None:
        stream, writer = run.stream, run.writer
        if stream.waiting:
            return  # the writer is at it; what it cannot write in time another worker generates again
        writer.remove(stream)
        call = calls.release(stream.job, stream.keys, stream.token, self._runtime.settings)
        try:
            connect.send(writer.client, call)
        except connect.ERRORS as error:
            log.warning("release of %s: %s; its lease will run out", stream.job.id, type(error).__name__)

    def _report(self, stream: OwnedStream) -> str:
        if isinstance(stream.lost, calls.Poison):
            raise PoisonError
        if isinstance(stream.lost, calls.Fenced):
            return "fenced"
        # Handed back while this thread waited for somebody else's run; or the store lost the record of a job that
        # runs, or its claim, and the next delivery of its message takes it up again.
        if stream.outcome is None or stream.lost is not None:
            raise HandedBackError
        if stream.outcome.state is State.FAILED:
            raise JobFailedError(stream.outcome.failure.code if stream.outcome.failure else "engine_failed")
        return stream.outcome.state.value


class LostContentError(Exception):
    """The stream does not hold what the record says was delivered."""


def _restore(stream: OwnedStream, rows: list[entries.Row], pos: int) -> None:
    """Take up what earlier owners delivered."""
    token_ids: list[int] = []
    pieces: list[Any] = []
    logprobs: list[bytes] = []
    for entry_id, raw in rows:
        entry = entries.parse(entry_id, raw)
        if isinstance(entry, Content) and entry.start == len(pieces):
            token_ids += entry.token_ids
            pieces += entries.split(entry) if entry.vectors else _pieces(entry)
            logprobs += entries.split_logprobs(entry) or [b""] * (entry.pos - entry.start)
    if len(pieces) != pos:
        raise LostContentError
    stream.restore(token_ids, pieces, logprobs)


def _pieces(entry: Content) -> list[str]:
    starts = (0, *entry.offsets[:-1])
    return [entry.text[start:end] for start, end in zip(starts, entry.offsets, strict=True)]


def _request(job: Job, spec: Spec) -> Ask:
    if isinstance(spec, TextSpec):
        return _text_request(job, spec)
    return EmbedRequest(
        seq=job.id,
        inputs=spec.inputs,
        dimensions=spec.dimensions,
        priority=_PRIORITY[job.lane],
        deadline=job.deadline_ms / 1000,
        tenant=job.tenant,
    )


def _text_request(job: Job, spec: TextSpec) -> Request:
    asked = spec.sampling
    sampling = SamplingParams(**{name: getattr(asked, name) for name in Sampling.__struct_fields__})
    return Request(
        seq=job.id,
        prompt=spec.prompt_ids,
        sampling=sampling,
        choice=spec.choice,
        priority=_PRIORITY[job.lane],
        deadline=job.deadline_ms / 1000,
        tenant=job.tenant,
    )


def _nothing_to_do(claim: calls.Claim) -> str:
    return claim.state.value if isinstance(claim, calls.Ended) else type(claim).__name__.lower()
