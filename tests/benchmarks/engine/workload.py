"""What is asked of every contender: sequences that come one after the other, and when each of their tokens came."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

Tokens = tuple[int, ...]
_PIECE = 32  # tokens by which room for a sequence grows: our rows, vLLM's blocks on a CPU


class Arrival(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence of a run. All from `temperature` on is for our own engine; the others do not
    know it."""

    after_s: float  # since the start of the run
    prompt: Tokens
    tokens: int  # to generate, greedily; the model's end token is one like any other
    temperature: float = 0.0  # of our own engine
    priority: int = 0  # rank of its lane
    pause_at: int = 0  # after so many tokens it is paused, and soon resumed
    hand_over_at: int = 0  # after so many it is ended, and given in again with its tokens, as to another worker


class Trace(msgspec.Struct, frozen=True):
    """What became of one sequence. Seconds since the start of the run."""

    due_s: float
    times_s: list[float]  # of each token that was seen
    generated: int  # tokens; some may have been seen together
    tokens: list[int] = []  # of who tells them
    begun: int = 1  # how often it was given a place in the batch; more than once when it had lost it

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]


class Texts:
    """Prompts in plain English, the same in every run."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def of_length(self, tokens: int, number: int) -> Tokens:
        """Exactly so many tokens of a story of its own."""
        chance = random.Random(number)
        story = ""
        while len(ids := self._encode(story)) < tokens:
            story += " ".join(_sentence(chance) for _ in range(1 + tokens // 12))
        return ids[:tokens]

    def repeating(self, tokens: int, number: int) -> Tokens:
        """Exactly so many tokens of a paragraph of 45 that is said over and over."""
        paragraph = self.of_length(45, number)
        return (paragraph * (1 + tokens // len(paragraph)))[:tokens]

    def questions(self, count: int) -> list[Tokens]:
        """Short prompts, none of them twice; up to 100."""
        asked = [f"{ask} {thing}" for thing in _THINGS for ask in _ASKS]
        return [self._encode(text) for text in asked[:count]]

    def _encode(self, text: str) -> Tokens:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def staggered(texts: Texts, count: int, tokens: int, *, every_s: float, seed: int = 0) -> list[Arrival]:
    """`count` prompts of 16 to 32 tokens that come at random times, `every_s` apart on average; the first at once."""
    chance = random.Random(seed)
    arrivals, after_s = [], 0.0
    for number in range(count):
        prompt = texts.of_length(chance.randint(16, 32), number)
        arrivals.append(Arrival(after_s, prompt, tokens))
        after_s += chance.expovariate(1 / every_s) if every_s else 0.0
    return arrivals


def kv_tokens(arrivals: Sequence[Arrival]) -> int:
    """What all of them need at once, each as long as the longest, in the coarsest pieces that a contender gives."""
    longest = max(len(arrival.prompt) + arrival.tokens for arrival in arrivals)
    return len(arrivals) * -(-longest // _PIECE) * _PIECE


_ASKS = (
    "Explain in plain words what is special about",
    "Write the first lines of a story about",
    "List five facts that everybody should know about",
    "Write a short letter to a friend who is afraid of",
)
_THINGS = (
    *("a lighthouse.", "the winter sea.", "an old railway station.", "bees.", "a city at night.", "thunder."),
    *("the inside of a clock.", "bread.", "mountains.", "the first day at school.", "long bridges.", "snow."),
    *("a river in flood.", "maps.", "the human heart.", "deep caves.", "radio.", "a market in the morning."),
    *("whales.", "glass.", "the desert.", "an empty theatre.", "stars.", "a walled garden.", "paper."),
)
_WHO = ("The keeper", "A sailor", "My sister", "The old clockmaker", "A child", "Nobody", "The doctor", "A traveller")
_DID = ("walked along", "remembered", "wrote about", "looked for", "painted", "was afraid of", "came back to", "left")
_WHAT = ("the harbour", "a narrow street", "the last train", "the lamp", "an unknown letter", "the hill", "the sea")
_WHEN = ("at dawn.", "in the rain.", "after many years.", "without a word.", "once more.", "when the bells rang.")


@lru_cache(maxsize=1)
def _parts() -> tuple[tuple[str, ...], ...]:
    return _WHO, _DID, _WHAT, _WHEN


def _sentence(chance: random.Random) -> str:
    return " ".join(chance.choice(part) for part in _parts())
