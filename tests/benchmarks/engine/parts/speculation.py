"""Guessing ahead: the same texts with and without, where there is much to guess from and where there is little."""

from __future__ import annotations

from tests.benchmarks.engine.lineup import Bench, Lineup
from tests.benchmarks.engine.report import figures, table
from tests.benchmarks.engine.workload import Arrival, Trace

_WITH, _WITHOUT = "guessing", "lean"
_TOKENS = 96
_ROUNDS = 2
_LEVELS = (1, 4, 16)


def run(bench: Bench) -> str:
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    rows = [row for dtype in dtypes for row in _measured(bench, dtype)]
    head = ["dtype", "prompts", "sequences", "tokens/s with", "without", "ratio", "equal texts"]
    return (
        f"{_TOKENS} tokens each. A repeating prompt says the same paragraph over and over and breaks off, as a text "
        "that is to be corrected or code that is to be changed would come again, and is followed greedily; so are "
        "stories, which this small model soon repeats. Questions are answered at temperature 1, where little can be "
        "guessed. The engine decides by itself when to guess: where that does not pay the ratio should be 1. Texts are "
        "equal but for rounding, which exact mode does not have.\n\n" + table(head, rows)
    )


def _measured(bench: Bench, dtype: str) -> list[list[str]]:
    rows = []
    with Lineup(bench, (_WITHOUT, _WITH), dtype, slots=max(_LEVELS), kv_tokens=max(_LEVELS) * 512) as lineup:
        for kind in ("repeating", "stories", "questions"):
            for count in _LEVELS[:2] if bench.quick else _LEVELS:
                seen = lineup.turns(_arrivals(bench, kind, count), rounds=1 if bench.quick else _ROUNDS)
                if seen.keys() == {_WITH, _WITHOUT}:
                    fast, plain = figures(seen[_WITH]).rate, figures(seen[_WITHOUT]).rate
                    same = _equal(seen[_WITH][0], seen[_WITHOUT][0])
                    shown = f"{fast:.0f}", f"{plain:.0f}", f"{fast / plain:.2f}", f"{same} of {count}"
                    rows.append([dtype, kind, str(count), *shown])
    return rows


def _arrivals(bench: Bench, kind: str, count: int) -> list[Arrival]:
    if kind == "questions":
        return [Arrival(0.0, prompt, _TOKENS, temperature=1.0) for prompt in bench.texts.questions(count)]
    make = bench.texts.repeating if kind == "repeating" else bench.texts.of_length
    return [Arrival(0.0, make(200, number), _TOKENS) for number in range(count)]


def _equal(some: list[Trace], others: list[Trace]) -> int:
    return sum(one.tokens == other.tokens for one, other in zip(some, others, strict=True))
