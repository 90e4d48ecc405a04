"""What runs in the next step, and in which row: bookkeeping without tensors.

Which sequence is next, and which must go for it, is the policy's word (policy.py). A running sequence owns a row of the
KV cache; rows are kept dense, so that the cache can hand the model a view instead of a copy:

    rows   [ decoding ... | prefilling ... ]
           0              `decoding`       len(rows)

A decoding sequence lacks the KV of its last token only, and every step feeds that one, and perhaps a guess of what
follows (speculation.py). A prefilling one is fed in
chunks, one chunk (or one group of short prompts) a step, so that a long prompt never stalls its neighbours for
longer than a chunk takes; and where both share one pass over the weights, a chunk beside decoding sequences is so small
that their step takes not even twice as long. What leaves is replaced by the last row, and the plan tells the cache of
the move.

What was cached of a sequence is kept by blocks when its prompt is complete and when it leaves its row (prefix.py), and
a sequence that begins like it, itself included, gets those blocks instead of computing them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.engine.policy import Policy
from workers.engine.prefix import BLOCK, Copy, PrefixIndex
from workers.engine.protocol import Request, Tokens
from workers.engine.sequence import Sequence

if TYPE_CHECKING:
    from workers.engine.guide import Guide
    from workers.engine.speculation import Costs, Speculation


_STRETCH = 0.7  # of a step's time: what prompts may add to it while others decode
_LEAST_CHUNK = 8


@dataclass(slots=True, frozen=True)
class Chunk:
    """`length` tokens of a sequence's prompt (and earlier output) to feed."""

    sequence: Sequence
    length: int

    @property
    def completes(self) -> bool:
        """Whether the last token's logits give the sequence's next token."""
        return self.sequence.cached + self.length == self.sequence.total


@dataclass(slots=True, frozen=True)
class Move:
    """Copy the first `length` cached tokens of row `source` to row `target`."""

    source: int
    target: int
    length: int


@dataclass(slots=True, frozen=True)
class Keep:
    """Copy these blocks out of row `row`."""

    row: int
    copies: list[Copy]


@dataclass(slots=True, frozen=True)
class Restore:
    """Copy these blocks into row `row`, one behind the other from position `start`."""

    row: int
    start: int
    blocks: list[int]


@dataclass(slots=True, frozen=True)
class Plan:
    """One step. First come the `moves`, in order, then the `restores`; by then there must be room for `rows` rows of
    `longest` tokens. `decode[i]` is in row i, `prefill[i]` in row len(decode) + i."""

    decode: list[Sequence]
    drafts: list[Tokens]  # of each that decodes: guessed tokens, to be fed behind its last one and drawn over
    prefill: list[Chunk]
    moves: list[Move | Keep]
    restores: list[Restore]
    rows: int  # in use, those included that wait for their turn to prefill
    longest: int  # tokens that the fullest row holds after the step

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    """Waiting queue, rows and KV budget of one engine.

    The cache is a rectangle, rows x longest row, so the budget is that rectangle's area: a sequence is admitted when
    (rows + 1) x (the greatest need among them) fits in `kv_tokens`. A need counts prompt, output and the whole of
    max_tokens, so what was admitted never has to be thrown out for want of room. Who is next is not overtaken: a
    large request waits for room, but not for ever.
    """

    def __init__(
        self,
        slots: int,
        kv_tokens: int,
        prefill_chunk: int,
        prefix_tokens: int = 0,
        speculation: Speculation | None = None,
        costs: Costs | None = None,
    ) -> None:
        """`costs`: of a step that decodes and prefills in one pass; None where these are two."""
        self.slots = slots
        self.kv_tokens = kv_tokens
        self._chunk = prefill_chunk
        self._costs = costs
        self._all: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._policy = Policy(slots)
        self._rows: list[Sequence] = []
        self._decoding = 0
        self._moves: list[Move | Keep] = []
        self._restores: list[Restore] = []
        self._prefixes = PrefixIndex(prefix_tokens)
        self._speculation = speculation
        self.reused_tokens = 0  # since the start
        self.preempted = 0  # since the start
        self._arrivals = 0

    def __contains__(self, seq: str) -> bool:
        return seq in self._all

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._all.values()))

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def paused(self) -> int:
        return len(self._all) - len(self._rows) - len(self._waiting)

    @property
    def kv_tokens_used(self) -> int:
        return sum(sequence.cached for sequence in self._rows)

    def add(self, request: Request, need: int, guide: Guide | None = None) -> None:
        sequence = Sequence(request, self._arrivals, need, list(request.output), guide=guide)
        self._arrivals += 1
        self._all[request.seq] = sequence
        self._waiting.append(sequence)

    def remove(self, seq: str, *, healthy: bool = True) -> bool:
        """Forget a sequence, wherever it is. False when it is unknown. Of one that is not `healthy` nothing is kept."""
        sequence = self._all.pop(seq, None)
        if sequence is not None:
            self._vacate(sequence, healthy=healthy)
            self._release(sequence)
        return sequence is not None

    def pause(self, seq: str) -> None:
        """Free the row. What is kept of what was cached is held until it goes on, or until let_go(); the rest is
        computed again."""
        sequence = self._all.get(seq)
        if sequence is not None and not sequence.paused:
            cached = sequence.tokens[: sequence.cached]
            self._vacate(sequence)
            sequence.held += self._prefixes.hold(sequence.request.tenant, cached)
            sequence.paused = True

    def let_go(self, seq: str) -> None:
        """What is kept of it may give way to others."""
        sequence = self._all.get(seq)
        if sequence is not None:
            self._release(sequence)

    def resume(self, seq: str) -> None:
        sequence = self._all.get(seq)
        if sequence is not None and sequence.paused:
            sequence.paused = False
            self._waiting.append(sequence)  # its arrival is the old one, so it does not lose its place

    def schedule(self) -> Plan:
        """Admit what fits, then plan the step."""
        while (sequence := self._policy.next(self._waiting, self._rows)) and self._make_room(sequence):
            self._waiting.remove(sequence)
            self._policy.admitted(sequence, self._waiting)
            self._rows.append(sequence)
        decode, prefill = self._rows[: self._decoding], self._prefill_group()
        if not (decode or prefill):  # what is to be moved and kept is still there when something runs again
            return Plan([], [], [], [], [], rows=0, longest=0)
        moves, self._moves = self._moves, []
        restores, self._restores = self._restores, []
        drafts: list[Tokens] = self._speculation.drafts(decode) if self._speculation else [()] * len(decode)
        held = [sequence.cached for sequence in self._rows]
        fed = [sequence.cached + 1 + len(draft) for sequence, draft in zip(decode, drafts, strict=True)]
        fed += [chunk.sequence.cached + chunk.length for chunk in prefill]
        return Plan(decode, drafts, prefill, moves, restores, rows=len(self._rows), longest=max(held + fed, default=0))

    def advance(self, plan: Plan, right: Iterable[Sequence] = (), failed: Collection[Sequence] = ()) -> None:
        """The plan's tokens are in the cache now, of drafts those that were right: for each its sequence is in `right`.
        Of those that `failed` nothing is to be kept for others."""
        for sequence in (*plan.decode, *right):
            sequence.cached += 1
        for row, chunk in enumerate(plan.prefill, len(plan.decode)):
            complete = chunk.completes
            self._decoding += complete
            chunk.sequence.cached += chunk.length
            chunk.sequence.entered = True
            if complete and chunk.sequence not in failed:
                self._keep(chunk.sequence, row)

    def _keep(self, sequence: Sequence, row: int) -> None:
        if copies := self._prefixes.keep(sequence.request.tenant, sequence.tokens[: sequence.cached]):
            self._moves.append(Keep(row, copies))

    def _release(self, sequence: Sequence) -> None:
        self._prefixes.release(sequence.held)
        sequence.held.clear()

    def _reuse(self, sequence: Sequence, row: int) -> None:
        """Give a sequence that is about to begin what is kept of it; its last token must be fed at least."""
        if sequence.entered:
            return
        blocks = self._prefixes.match(sequence.request.tenant, sequence.tokens[: sequence.total - 1])
        start, end = sequence.cached, len(blocks) * BLOCK
        if end > start:
            self._restores.append(Restore(row, start, blocks[start // BLOCK :]))
            self.reused_tokens += end - start
            sequence.cached = end
        self._release(sequence)

    def _prefill_group(self) -> list[Chunk]:
        # Several short prompts share a forward, padded to the longest of them. Only a chunk that fills the budget
        # leaves its prompt unfinished, and such a chunk is alone: so what completes is always a prefix of the
        # prefilling rows, and joins the decoding ones without a move.
        group: list[Chunk] = []
        longest, limit = 0, self._chunk_now()
        for row, sequence in enumerate(self._rows[self._decoding :], self._decoding):
            self._reuse(sequence, row)
            length = min(sequence.total - sequence.cached, limit)
            longest = max(longest, length)
            if group and longest * (len(group) + 1) > limit:
                break
            group.append(Chunk(sequence, length))
        return group

    def _chunk_now(self) -> int:
        """How many tokens of prompts the next step may take."""
        if not self._decoding or self._costs is None:
            return self._chunk
        beside = max(_LEAST_CHUNK, self._costs.beside(self._decoding, _STRETCH) // _LEAST_CHUNK * _LEAST_CHUNK)
        return int(min(self._chunk, beside))

    def _make_room(self, sequence: Sequence) -> bool:
        """Whether it fits, if need be after others have gone back to the queue; nobody goes in vain."""
        stay, leave = list(self._rows), []
        victims = self._policy.victims(sequence, self._rows)
        while not self._fit([*stay, sequence]):
            if not victims:
                return False
            leave.append(victims.pop(0))
            stay.remove(leave[-1])
        for victim in leave:
            self._vacate(victim)
            self._waiting.append(victim)
        self.preempted += len(leave)
        return True

    def _fit(self, rows: list[Sequence]) -> bool:
        return len(rows) <= self.slots and len(rows) * max(row.need for row in rows) <= self.kv_tokens

    def _vacate(self, sequence: Sequence, *, healthy: bool = True) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._rows:
            row = self._rows.index(sequence)
            if healthy:
                self._keep(sequence, row)
            self._close_gap(row)
        sequence.cached, sequence.entered = 0, False

    def _close_gap(self, row: int) -> None:
        if row < self._decoding:
            self._decoding -= 1
            self._move(self._decoding, row)
            row = self._decoding
        self._move(len(self._rows) - 1, row)
        self._rows.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._rows[target] = self._rows[source]
            self._moves.append(Move(source, target, self._rows[source].cached))
