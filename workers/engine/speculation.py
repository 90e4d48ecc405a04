"""Speculation by prompt lookup: what may come next is guessed from what the sequence said before. No tensors.

Where the last three tokens of a sequence stood earlier in its prompt or output, those that followed them there are a
guess. The model is fed the guess behind the sequence's last token and draws at each of these positions, as it would
have done one step after the other; as far as it draws what was guessed, one step has brought several tokens. So a
guess never changes a text, only how fast it comes.

A step with guesses costs more than one without, the more so the more rows there are. What it costs is measured when
the model is loaded; how often a sequence's guesses are right is counted all along, also where they are not used.
Together they say how far ahead to guess in each step, mostly not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from workers.engine.protocol import Tokens
from workers.engine.sequence import Sequence

MOST = 8  # tokens guessed at once
_GRAM = 3  # tokens that have to agree
_FADE = 0.9  # what a count is worth one guess later
_PRIOR = (1.0, 2.0)  # guesses that were right, of how many, before there were any
_GAIN = 1.05  # below this it is not worth it: the cost was measured, but on another day


class Costs(NamedTuple):
    """Seconds that a step takes, by the tokens that it is fed: lines between what was measured, of which the last goes
    on. Few tokens wait for the weights and cost the same, many for the arithmetic: one line would be far from either.
    """

    measured: tuple[tuple[int, float], ...]  # tokens and seconds, two at least, by tokens; more never cost less

    @classmethod
    def through(cls, *measured: tuple[int, float]) -> Costs:
        """From measurements, by tokens; that more tokens took less time was noise."""
        seconds = accumulate((seconds for _, seconds in measured), max)
        return cls(tuple(zip((tokens for tokens, _ in measured), seconds, strict=True)))

    def of(self, tokens: float) -> float:
        pieces = list(pairwise(self.measured))
        (fewer, low), (more, high) = next((piece for piece in pieces if tokens <= piece[1][0]), pieces[-1])
        return max(0.0, low + (high - low) * (tokens - fewer) / (more - fewer))

    def beside(self, tokens: int, stretch: float) -> float:
        """How many tokens more make a step of `tokens` this share longer."""
        seconds = (1 + stretch) * self.of(tokens)
        pieces = list(pairwise(self.measured))
        (fewer, low), (more, high) = next((piece for piece in pieces if seconds <= piece[1][1]), pieces[-1])
        return fewer + (more - fewer) * (seconds - low) / (high - low) - tokens if high > low else math.inf


@dataclass(slots=True)
class Lookup:
    """Where each three tokens of one sequence stood last, and how good the guesses were."""

    tokens: list[int]
    known: int = 0  # leading tokens whose triples are in `ends`
    ends: dict[Tokens, int] = field(default_factory=dict)
    right: float = _PRIOR[0]
    tried: float = _PRIOR[1]
    guess: Tokens = ()  # what was thought to follow `tokens`

    @property
    def chance(self) -> float:
        """That a guessed token is right, where those before it were."""
        return self.right / self.tried

    def follow(self, output: Rows[int], prompt_length: int) -> None:
        """Take what was drawn since, and see how good the guess was."""
        new = output[len(self.tokens) - prompt_length :]
        for guessed, drawn in zip(self.guess, new, strict=False):
            self.right = self.right * _FADE + (guessed == drawn)
            self.tried = self.tried * _FADE + 1
            if guessed != drawn:
                break
        self.tokens.extend(new)
        self.guess = ()

    def look(self, most: int) -> Tokens:
        """Up to `most` tokens that followed when the last three stood here before."""
        tokens = self.tokens
        for end in range(max(self.known, _GRAM), len(tokens)):
            self.ends[tuple(tokens[end - _GRAM : end])] = end
        self.known = len(tokens)
        start = self.ends.get(tuple(tokens[-_GRAM:]))
        if start is not None:
            period = len(tokens) - start  # what goes on beyond the end goes round
            self.guess = tuple(tokens[start + n % period] for n in range(most))
        return self.guess


class Speculation:
    """Of one engine."""

    def __init__(self, costs: Costs, max_context: int) -> None:
        self._costs = costs
        self._max_context = max_context

    def drafts(self, decoding: Rows[Sequence]) -> list[Tokens]:
        """What to feed behind the last token of each."""
        guesses = [self._guess(sequence) for sequence in decoding]
        chances = [sequence.lookup.chance if sequence.lookup else 0.0 for sequence in decoding]
        width = best_width(self._costs, chances, [len(guess) for guess in guesses])
        return [guess[:width] for guess in guesses]

    def _guess(self, sequence: Sequence) -> Tokens:
        if sequence.guide is not None:  # what may come depends on what came, and it knows that for one token only
            return ()
        if sequence.lookup is None:
            sequence.lookup = Lookup([*sequence.tokens])
        lookup = sequence.lookup
        lookup.follow(sequence.output, len(sequence.request.prompt))
        left = min(
            sequence.request.sampling.max_tokens - len(sequence.output), self._max_context - sequence.total
        )  # the last of them is drawn, not guessed
        return lookup.look(MOST)[: max(0, left - 1)]


def best_width(costs: Costs, chances: Rows[float], lengths: Rows[int]) -> int:
    """How many tokens ahead to guess so that tokens come fastest; rows are padded to the longest guess."""
    if not any(lengths):  # nor is anything known of a step without rows: it may cost nothing
        return 0
    rows = len(chances)

    def pace(width: int) -> float:
        guessed = sum(_expected(chance, min(width, length)) for chance, length in zip(chances, lengths, strict=True))
        return (rows + guessed) / costs.of(rows * (1 + width))

    best = max(range(max(lengths) + 1), key=pace)
    return best if best and pace(best) >= _GAIN * pace(0) else 0


def _expected(chance: float, length: int) -> float:
    """How many of so many guessed tokens will be right before one is wrong."""
    return float(length) if chance >= 1 else chance * (1 - chance**length) / (1 - chance)
