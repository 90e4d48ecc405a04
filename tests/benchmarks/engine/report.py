"""Figures of traces, tables of figures, and the page of the docs, whose sections may come from runs of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.benchmarks.engine.workload import Trace


@dataclass(frozen=True)
class Figures:
    """Of one contender at one load."""

    rate: float  # tokens/s over the whole run
    ttft: tuple[float, float]  # seconds, p50 and p99
    gap: tuple[float, float]  # between two tokens of one sequence


def figures(runs: Sequence[Sequence[Trace]]) -> Figures:
    """The median rate of the runs; times of all of them together."""
    ttfts = [trace.ttft_s for run in runs for trace in run]
    gaps = [gap for run in runs for trace in run for gap in trace.gaps_s]
    return Figures(
        median(rate(run) for run in runs),
        (percentile(ttfts, 50), percentile(ttfts, 99)),
        (percentile(gaps, 50), percentile(gaps, 99)),
    )


def rate(run: Sequence[Trace]) -> float:
    seconds = max(trace.times_s[-1] for trace in run) - min(trace.due_s for trace in run)
    return sum(trace.generated for trace in run) / seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank, so that it is one of them; NaN of none."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)] if ranked else math.nan


@dataclass(frozen=True)
class Goal:
    """A figure against its reference of the same run, and the bound that it is to keep."""

    what: str
    ours: str
    reference: str
    against: str
    ratio: float
    bound: float
    at_least: bool = True

    @property
    def row(self) -> list[str]:
        met = self.ratio >= self.bound if self.at_least else self.ratio <= self.bound
        sign = "≥" if self.at_least else "≤"
        verdict = "yes" if met else "**no**"
        return [
            self.what,
            self.ours,
            self.reference,
            f"{self.ratio:.2f}" if self.ratio >= 0.1 else f"{self.ratio:.4f}",
            f"{sign} {self.bound:g}",
            verdict,
            self.against,
        ]


def goals(rows: Sequence[Goal]) -> str:
    head = ["what", "Lingbot", "reference", "ratio", "goal", "met", "the reference"]
    return table(head, [goal.row for goal in rows]) if rows else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def milliseconds(*seconds: float) -> str:
    return " / ".join("-" if math.isnan(value) else f"{value * 1000:,.0f}" for value in seconds)


# --- the page ---

_MARK = re.compile(r"<!-- (\S+) -->\n.*?<!-- /\1 -->\n", re.DOTALL)


def update(page: Path, sections: dict[str, str]) -> None:
    """Put sections in their places; a page has a pair of marks for each."""
    text = page.read_text()
    if missing := sections.keys() - set(_MARK.findall(text)):
        raise ValueError(f"{page} has no place for {', '.join(sorted(missing))}")
    page.write_text(_MARK.sub(lambda found: _section(found, sections), text))


def _section(found: re.Match[str], sections: dict[str, str]) -> str:
    name = found.group(1)
    return f"<!-- {name} -->\n{sections[name]}<!-- /{name} -->\n" if name in sections else found.group(0)
