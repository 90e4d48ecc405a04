"""A sequence in an engine: its request, what came of it, how much of it is cached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from workers.engine.protocol import Request, Tokens

if TYPE_CHECKING:
    from workers.engine.guide import Guide
    from workers.engine.speculation import Lookup


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request on its way."""

    request: Request
    arrival: int
    need: int  # KV tokens it can come to hold
    output: list[int] = field(default_factory=list)  # all of it, what earlier owners generated included
    cached: int = 0  # leading tokens of prompt + output whose KV is in the cache
    paused: bool = False
    stays: bool = False  # its lane had waited long: it is not sent back to the queue
    entered: bool = False  # some of it was computed in the row that it is in
    guide: Guide | None = None  # what holds it to its schema, behind `output`
    held: list[bytes] = field(default_factory=list)  # blocks of it that stay kept while it is paused
    lookup: Lookup | None = None  # what its guesses come from

    @property
    def tokens(self) -> Tokens:
        return (*self.request.prompt, *self.output)

    @property
    def lane(self) -> int:
        """0 is served first."""
        return self.request.priority

    @property
    def total(self) -> int:
        return len(self.request.prompt) + len(self.output)

    def fed(self, length: int) -> Tokens:
        """The next `length` tokens to feed."""
        prompt, start = self.request.prompt, self.cached
        if start >= len(prompt):  # decoding: do not copy the prompt in every step
            start -= len(prompt)
            return tuple(self.output[start : start + length])
        return self.tokens[start : start + length]

    def ahead(self, tokens: Tokens) -> Sequence:
        """Itself as it is to be when these have been drawn."""
        return replace(self, output=[*self.output, *tokens]) if tokens else self
