"""Writes what workers generate into the streams of one home.

One thread and one connection per home. Each round it takes every stream that has something due and sends all of it in
one pipeline: chunks, terminal entries, lease renewals. What came meanwhile is due in the next round, so chunks grow
by themselves when Redis or the way to it is slow. A chunk is kept until its stream has ended: whatever the store
forgot can be written again from the position at which it says it stands. Some seconds after the end, when a store that
syncs each second can lose it no more, the writer looks once more, and makes a record again that is gone by then. What
is not durable is bounded: past the window the owner is told to pause, and to go on when the store has caught up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from brokers import calls, connect, entries
from brokers.job import Failure, FinishReason, Job, State
from brokers.settings import Settings

log = logging.getLogger(__name__)

_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_REFUSED_S = 0.5
_LOOK_S = 3.0  # after the end; a store may lose its last 2 s
_CHUNK_BYTES = 1 << 15  # of vectors in one entry: what a reader takes at once stays small
_ROUND_BYTES = 1 << 20  # of vectors of one stream in one round: the other streams are not kept waiting
_TOKEN_BYTES = 64  # a token's share of the window in bytes, by which vectors are counted


class Outcome(NamedTuple):
    """How a job ends."""

    state: State
    reason: FinishReason
    failure: Failure | None = None


class _Write(NamedTuple):
    """One command of a round, and what it brings about."""

    stream: OwnedStream
    call: calls.Call
    pos: int | None = None  # content up to here is durable then
    ends: bool = False
    begins: bool = False
    looks: bool = False


class _Look(NamedTuple):
    """What is asked of an ended job, or done for it, and when (monotonic)."""

    at: float
    stream: OwnedStream
    call: calls.Call


class Chunk(NamedTuple):
    """One content entry to write."""

    start: int
    pos: int
    fields: tuple[str | bytes, ...]


class OwnedStream:
    """One stream of a text that this process owns: its content from the start, and how much of it is durable.

    Pushed by one thread and written by another; the writer's lock guards everything that changes. `remake` makes the
    job's record again, should the store lose it together with its end.
    """

    def __init__(self, job: Job, keys: calls.Keys, token: str, remake: calls.Call | None = None) -> None:
        self.job = job
        self.keys = keys
        self.token = token
        self.remake = remake
        self.token_ids: list[int] = []
        self.pieces: list[Any] = []  # what each position brought: here a token's text
        self.logprobs: list[bytes] = []  # packed, of each position, where they are asked for
        self.durable = 0  # positions in the store
        self.outcome: Outcome | None = None
        # Why this process may no longer write.
        self.lost: calls.Fenced | calls.Unowned | calls.Gone | calls.Poison | None = None
        self.begun = False  # the engine works on it
        self.begun_is_out = False
        self.settled = threading.Event()  # ended in the store, or lost
        self._digest = entries.Digest()
        self._digested = 0
        self._pending_since: float | None = None
        self._first_is_out = False
        self.renewed_at = time.monotonic()
        self.held_until = 0.0  # the store refused a write: not before this (monotonic)

    def restore(
        self, token_ids: Sequence[int], pieces: Sequence[str] | Sequence[bytes], logprobs: Sequence[bytes] = ()
    ) -> None:
        """Content that earlier owners wrote."""
        self.token_ids, self.pieces, self.logprobs = list(token_ids), list(pieces), list(logprobs)
        self.durable = self.pos

    @property
    def pos(self) -> int:
        """The position of all there is, durable or not."""
        return len(self.pieces)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def due_in(self, now: float, settings: Settings) -> float | None:
        """Seconds until something is to be written; None when nothing waits."""
        if self.outcome is None and not self.waiting:
            return None
        if self.held_until > now:
            return self.held_until - now
        if (
            self.outcome is not None
            or self.waiting >= settings.flush_tokens
            or not self._first_is_out
            or self._pending_since is None
        ):
            return 0.0
        return max(0.0, self._pending_since + settings.flush_ms / 1000 - now)

    @property
    def waiting(self) -> int:
        """Positions that are not durable yet."""
        return self.pos - self.durable

    @property
    def weight(self) -> int:
        """What is not durable yet, in tokens of the window."""
        return self.waiting

    def push(
        self, token_ids: Sequence[int], pieces: Sequence[str] | Sequence[bytes], logprobs: Sequence[bytes] = ()
    ) -> None:
        if self._pending_since is None:
            self._pending_since = time.monotonic()
        self.token_ids.extend(token_ids)
        self.pieces.extend(pieces)
        self.logprobs.extend(logprobs)

    def chunks(self) -> list[Chunk]:
        """What is not durable yet, or as much of it as goes into one round."""
        if not self.waiting:
            return []
        self._pending_since = None
        self._first_is_out = True
        return self._chunks(self.durable)

    def _chunks(self, start: int) -> list[Chunk]:
        pos = self.pos
        logprobs = self.logprobs[start:]
        written = entries.fields(self.token_ids[start:], self.pieces[start:], self._digest_at(pos), logprobs)
        return [Chunk(start, pos, written)]

    def _digest_at(self, pos: int) -> str:
        if self._digested > pos:  # cannot go back: begin again
            self._digest, self._digested = entries.Digest(), 0
        self._digest.update("".join(self.pieces[self._digested : pos]))
        self._digested = pos
        return self._digest.hex()


class VectorStream(OwnedStream):
    """One stream of an embedding job: a position is an input, and what it brought is its vector."""

    @property
    def weight(self) -> int:
        return self.waiting * max(1, self._width // _TOKEN_BYTES)

    @property
    def _width(self) -> int:
        return len(self.pieces[0]) if self.pieces else 0

    def _chunks(self, start: int) -> list[Chunk]:
        each = max(1, _CHUNK_BYTES // self._width)
        end = min(self.pos, start + max(1, _ROUND_BYTES // self._width))
        cuts = [(at, min(at + each, end)) for at in range(start, end, each)]
        return [Chunk(at, to, entries.vector_fields(self.pieces[at:to])) for at, to in cuts]


class Pushed(NamedTuple):
    """What a stream gets, and how it ends if it does."""

    stream: OwnedStream
    token_ids: Sequence[int] = ()
    pieces: Sequence[str] | Sequence[bytes] = ()  # one for each position
    outcome: Outcome | None = None
    logprobs: Sequence[bytes] = ()  # packed, one for each position or none


class ChunkWriter:
    """The writer of one home. From its thread it calls `on_cancel` for a stream whose job is asked to stop, and
    `on_room(False)` when its window is full, `on_room(True)` when it has room again."""

    def __init__(
        self,
        settings: Settings,
        home: str,
        on_cancel: Callable[[OwnedStream], None],
        on_room: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._on_cancel = on_cancel
        self._on_room = on_room
        self._full = False
        self._client = connect.blocking(settings, home, timeout_s=settings.store_timeout_s)
        self._streams: dict[str, OwnedStream] = {}
        self._looks: dict[str, _Look] = {}  # by job
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"chunk-writer-{home}", daemon=True)
        self._thread.start()

    @property
    def client(self) -> connect.Blocking:
        return self._client

    def add(self, stream: OwnedStream) -> None:
        with self._changed:
            self._streams[stream.job.id] = stream

    def push(self, pushed: Sequence[Pushed]) -> None:
        """What one engine step brought to each stream."""
        with self._changed:
            for stream, token_ids, pieces, outcome, logprobs in pushed:
                if pieces:
                    stream.push(token_ids, pieces, logprobs)
                if outcome and stream.outcome is None:
                    stream.outcome = outcome
            self._changed.notify()

    def begin(self, streams: Sequence[OwnedStream]) -> None:
        """The engine is about to work on these."""
        with self._changed:
            for stream in streams:
                stream.begun = True
            self._changed.notify()

    @property
    def full(self) -> bool:
        """Whether what is not durable fills the window."""
        return self._full

    def remove(self, stream: OwnedStream) -> None:
        """Write nothing more of it; its lease is not renewed from now on."""
        with self._changed:
            self._forget(stream)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=5)
        self._client.close()

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while work := self._next_round():
            try:
                replies = connect.send_all(self._client, [write.call for write in work])
                failures = 0
            except connect.ERRORS as error:
                pause = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                failures += 1
                log.warning("store away (%s), trying again in %.2f s", type(error).__name__, pause)
                self._watch_window()
                time.sleep(pause)
                continue
            self._settle(work, replies)
            self._watch_window()

    def _watch_window(self) -> None:
        with self._changed:
            waiting = sum(stream.weight for stream in self._streams.values())
        window = self._settings.window_tokens
        if self._full != (waiting >= (window // 2 if self._full else window)):
            self._full = not self._full
            self._on_room(not self._full)

    def _next_round(self) -> list[_Write]:
        """Wait until something is due. Empty when the writer is closed and everything is written."""
        with self._changed:
            while True:
                now = time.monotonic()
                work = [write for stream in self._streams.values() for write in self._due(stream, now)]
                work += [_Write(look.stream, look.call, looks=True) for look in self._due_looks(now)]
                if work or (self._closing and not self._streams):
                    return work
                if self._closing:
                    return []
                self._changed.wait(self._patience(now))

    def _patience(self, now: float) -> float:
        renew_s = self._settings.renew_ms / 1000
        waits = [s.renewed_at + renew_s - now for s in self._streams.values()]
        waits += [max(look.at, look.stream.held_until) - now for look in self._looks.values()]
        waits += [s.held_until - now for s in self._streams.values() if s.held_until > now]
        waits += [due for s in self._streams.values() if (due := s.due_in(now, self._settings)) is not None]
        return max(0.001, min(waits, default=renew_s))

    def _due(self, stream: OwnedStream, now: float) -> list[_Write]:
        lease_ms = self._settings.lease_ms
        due: list[_Write] = []
        if stream.held_until > now:
            return due
        if stream.begun and not stream.begun_is_out:
            due.append(_Write(stream, calls.begin(stream.keys, stream.token), begins=True))
        if stream.due_in(now, self._settings) == 0.0:
            chunks = stream.chunks()
            due += [_Write(stream, calls.append(stream.keys, stream.token, lease_ms, *c), pos=c.pos) for c in chunks]
            if stream.outcome and (chunks[-1].pos if chunks else stream.durable) == stream.pos:
                due.append(_Write(stream, _finish(stream, stream.outcome), ends=True))
        if due or now - stream.renewed_at >= self._settings.renew_ms / 1000:
            due = due or [_Write(stream, calls.renew(stream.keys, stream.token, lease_ms))]
            stream.renewed_at = now
        return due

    def _due_looks(self, now: float) -> list[_Look]:
        return [look for look in self._looks.values() if max(look.at, look.stream.held_until) <= now]

    def _settle(self, work: list[_Write], replies: list[Any]) -> None:
        refusals = [reply for reply in replies if isinstance(reply, Exception)]
        with self._changed:
            pairs = zip(work, replies, strict=True)
            answered = []
            for write, reply in pairs:
                if isinstance(reply, Exception):  # out of memory, loading, read-only, its server away: waited out
                    write.stream.held_until = time.monotonic() + _REFUSED_S
                else:
                    answered.append((write, write.call.parse(reply)))
            cancelled = [write.stream for write, written in answered if self._apply(write, written)]
        for stream in cancelled:
            self._on_cancel(stream)
        if refusals:
            log.warning("the store refused %d of %d writes: %s", len(refusals), len(work), refusals[0])

    def _apply(self, write: _Write, written: calls.Written) -> bool:
        """Take a reply in. True when the job is asked to stop."""
        stream = write.stream
        if write.looks:
            self._looked(write, written)
            return False
        match written:
            case calls.Accepted(cancel):
                if write.pos is not None:
                    stream.durable = write.pos
                stream.begun_is_out = stream.begun_is_out or write.begins
                if write.ends:
                    self._forget(stream)
                    self._look_later(stream)
                return cancel and stream.outcome is None
            case calls.Rewind(pos):
                # Ours, written by a try whose reply was lost; or the store forgot its last second.
                stream.durable = min(pos, stream.pos)
            case calls.Fenced() | calls.Unowned() | calls.Gone():
                stream.lost = written
                self._forget(stream)
        return False

    def _look_later(self, stream: OwnedStream) -> None:
        if stream.remake:
            at = time.monotonic() + _LOOK_S
            self._looks[stream.job.id] = _Look(at, stream, calls.look(stream.job, stream.keys))

    def _looked(self, write: _Write, written: calls.Written) -> None:
        stream = write.stream
        del self._looks[stream.job.id]
        if write.call is stream.remake:  # which the store may lose once more
            self._look_later(stream)
        elif isinstance(written, calls.Gone) and stream.remake:
            log.warning("job %s: the store lost it after its end; made again", stream.job.id)
            self._looks[stream.job.id] = _Look(0.0, stream, stream.remake)

    def _forget(self, stream: OwnedStream) -> None:
        self._streams.pop(stream.job.id, None)
        stream.settled.set()


def _finish(stream: OwnedStream, outcome: Outcome) -> calls.Call:
    prompt_tokens = stream.job.prompt_tokens
    return calls.finish(
        stream.keys, stream.token, stream.pos, outcome.state, outcome.reason, prompt_tokens, outcome.failure
    )
