"""Who is blamed when an engine dies: the one job that kills it, after being alone with it, and nobody else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.isolation import PROBATION, Isolation

STRIKES = 3


class Simulated:
    """An engine of `slots` in which some sequences kill it when they reach a position."""

    def __init__(self, fatal: dict[str, int], lengths: dict[str, int], slots: int) -> None:
        self.fatal = fatal
        self.lengths = lengths
        self.slots = slots
        self.policy = Isolation()
        self.position = dict.fromkeys(lengths, 0)
        self.since = dict.fromkeys(lengths, 0)
        self.strikes: dict[str, int] = {}
        self.submitted: list[str] = []
        self.done: set[str] = set()
        self.crashes = 0

    def submit(self, seq: str, *, suspect: bool = False) -> None:
        self._run(self.policy.admit(seq, suspect=suspect))

    def step(self) -> None:
        batch = self.submitted[: self.slots]
        for seq in batch:
            if self.position[seq] == self.fatal.get(seq):
                self._crash(batch)
                return
        for seq in batch:
            self.position[seq] += 1
            self.since[seq] += 1
            if self.position[seq] == self.lengths[seq]:
                self._end(seq)
            elif self.since[seq] == PROBATION:
                self._run(self.policy.cleared(seq))

    def _crash(self, batch: list[str]) -> None:
        self.crashes += 1
        others = self.submitted[self.slots :]
        self.submitted = []
        verdict = self.policy.crashed(batch, others)
        if verdict.struck:
            self.strikes[verdict.struck] = self.strikes.get(verdict.struck, 0) + 1
        self._run(verdict.run)
        if verdict.struck and self.strikes[verdict.struck] >= STRIKES:
            self._end(verdict.struck)

    def _end(self, seq: str) -> None:
        self.done.add(seq)
        self.submitted = [other for other in self.submitted if other != seq]
        self._run(self.policy.cleared(seq))

    def _run(self, seqs: list[str]) -> None:
        for seq in seqs:
            self.since[seq] = 0
        self.submitted += seqs


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    poison=st.dictionaries(st.integers(0, 39), st.integers(0, 30), max_size=3),
    slots=st.integers(1, 32),
    stagger=st.integers(0, 3),
    suspects=st.sets(st.integers(0, 39)),
)
def test_only_the_fatal_are_struck_and_everybody_else_finishes(
    lengths: list[int], poison: dict[int, int], slots: int, stagger: int, suspects: set[int]
) -> None:
    all_lengths = {str(number): length for number, length in enumerate(lengths)}
    fatal = {str(n): at for n, at in poison.items() if n < len(lengths) and at < lengths[n]}
    engine = Simulated(fatal, all_lengths, slots)
    for seq in all_lengths:
        engine.submit(seq, suspect=int(seq) in suspects)
        for _ in range(stagger):
            engine.step()
    for _ in range(20_000):
        if len(engine.done) == len(all_lengths):
            break
        engine.step()
    assert engine.done == set(all_lengths)
    assert engine.strikes == dict.fromkeys(fatal, STRIKES)
    assert engine.policy.idle


def test_one_poison_among_32_is_alone_after_five_crashes() -> None:
    lengths = {str(number): 40 for number in range(32)}
    engine = Simulated({"0": 0}, lengths, slots=32)
    for seq in lengths:
        engine.submit(seq)
    while "0" not in engine.done:
        engine.step()
    assert engine.crashes == 5 + STRIKES


def test_suspects_of_dead_workers_are_tried_one_at_a_time_beside_the_others() -> None:
    policy = Isolation()
    assert policy.admit("new") == ["new"]
    assert policy.admit("a", suspect=True) == ["a"]
    assert [policy.admit(seq, suspect=True) for seq in "bcd"] == [[], [], []]
    assert policy.admit("newer") == ["newer"], "others do not wait for them"
    assert policy.cleared("new") == []
    assert [policy.runs(seq) for seq in "abc"] == [True, False, False]
    assert policy.cleared("c") == [], "cancelled while it waits"
    assert policy.cleared("a") == ["b"]
    assert policy.cleared("b") == ["d"]
    assert policy.cleared("d") == []


def test_suspects_of_dead_workers_wait_while_a_crash_is_looked_into() -> None:
    policy = Isolation()
    for seq in ("x", "y"):
        policy.admit(seq)
    assert policy.admit("a", suspect=True) == ["a"]
    assert policy.admit("b", suspect=True) == []
    assert policy.crashed(["x", "y", "a"], []).run == ["x", "y"]
    assert policy.cleared("x") == []
    assert policy.cleared("y") == ["a"]
    assert policy.cleared("a") == ["b"]
