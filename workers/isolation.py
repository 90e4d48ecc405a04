"""Whose fault is it that an engine died? A policy without I/O: told of crashes and progress, it says who may run.

After a crash all that ran are suspects. Half of them run alone; who makes progress is cleared, and when all of the
half are, the other half joins them. When the half dies too, it is halved again. So one poison job among 32 is alone
after five crashes, and only a job that was alone in the engine when that died is struck. Whoever else waits meanwhile,
newcomers too, is held back, so that nobody innocent is blamed.

A job may kill the whole worker instead, and take this policy along. Then the store's record tells, by its strikes, that
a newcomer is suspect: of those one at a time runs, beside the others, so that the next death blames one of them only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PROBATION = 8  # tokens since it was submitted that clear a suspect


class Verdict(NamedTuple):
    """What follows from a crash."""

    struck: str | None  # was alone in the engine when it died
    run: list[str]  # to be submitted again, now


class Isolation:
    """Suspects and the held of one engine. Not thread-safe."""

    def __init__(self) -> None:
        self._trial: set[str] = set()  # running, not yet cleared
        self._groups: list[list[str]] = []  # to be tried, one after the other
        self._held: list[str] = []  # innocent or new: run when nobody is suspect any more
        self._single: str | None = None  # running, suspect for the deaths of workers
        self._singles: list[str] = []  # to be tried like it, one after the other

    @property
    def idle(self) -> bool:
        """True when no crash of this engine is looked into."""
        return not self._trial and not self._groups

    def runs(self, seq: str) -> bool:
        """Whether it may be in the engine now: it is neither held nor waits for its turn."""
        return all(seq not in waiting for waiting in (self._held, self._singles, *self._groups))

    def admit(self, seq: str, *, suspect: bool = False) -> list[str]:
        """Who may run now that a new sequence came: it, or nobody."""
        if suspect:
            self._singles.append(seq)
            return self._next_single()
        if self.idle:
            return [seq]
        self._held.append(seq)
        return []

    def crashed(self, begun: Iterable[str], others: Iterable[str]) -> Verdict:
        """The engine died; `begun` were in its batch, `others` had been submitted and not begun."""
        self._single = None
        ran = list(begun)
        suspects = [seq for seq in ran if seq in self._trial] or ran
        struck = suspects[0] if len(ran) == 1 and len(suspects) == 1 else None
        self._held += [seq for seq in (*ran, *others) if seq not in suspects]
        half = (len(suspects) + 1) // 2 if len(suspects) > 1 else len(suspects)
        if suspects[half:]:
            self._groups.insert(0, suspects[half:])
        self._trial = set(suspects[:half])
        return Verdict(struck, suspects[:half] if suspects else self._next())

    def cleared(self, seq: str) -> list[str]:
        """It made progress, or ended. Who may run now that could not before."""
        self._forget(seq)
        if seq == self._single:
            self._single = None
        if seq in self._trial:
            self._trial.discard(seq)
            return self._next() if not self._trial else []
        return self._next_single()

    def _next(self) -> list[str]:
        if self._groups:
            group = self._groups.pop(0)
            self._trial = set(group)
            return group
        held, self._held = self._held, []
        return held + self._next_single()

    def _next_single(self) -> list[str]:
        if not self.idle or self._single or not self._singles:
            return []
        self._single = self._singles.pop(0)
        return [self._single]

    def _forget(self, seq: str) -> None:
        """Somebody that waits may be cancelled meanwhile."""
        self._held = [held for held in self._held if held != seq]
        self._singles = [single for single in self._singles if single != seq]
        self._groups = [rest for group in self._groups if (rest := [s for s in group if s != seq])]
