"""Small things a little later, in order."""

from __future__ import annotations

import threading
import time
from functools import partial

from workers.later import Later


def fail() -> None:
    raise RuntimeError("on purpose")


def test_what_is_due_first_runs_first_and_a_failure_stops_nobody() -> None:
    later, ran, done = Later(most=10), [], threading.Event()
    later.start()
    later.call(0.09, done.set)
    later.call(0.06, lambda: ran.append("last"))
    later.call(0.03, fail)
    later.call(0.0, lambda: ran.append("first"))
    assert done.wait(5)
    assert ran == ["first", "last"]


def test_a_flush_runs_everything_at_once() -> None:
    later, ran = Later(most=10), []
    later.call(60, lambda: ran.append("b"))
    later.call(30, lambda: ran.append("a"))
    began = time.monotonic()
    later.flush()
    assert ran == ["a", "b"]
    assert time.monotonic() - began < 1


def test_one_too_many_runs_the_first_early() -> None:
    later = Later(most=2)
    ran: list[str] = []
    for name, seconds in (("c", 60), ("a", 20), ("b", 40)):
        later.call(seconds, partial(ran.append, name))
    assert ran == ["a"]
