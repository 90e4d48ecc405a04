"""Small things a little later, in order."""

from __future__ import annotations

import threading
import time

from workers.later import Later


def fail() -> None:
    raise RuntimeError("on purpose")


def test_what_is_due_first_runs_first_and_a_failure_stops_nobody() -> None:
    later, ran, done = Later(), [], threading.Event()
    later.start()
    later.call(0.09, done.set)
    later.call(0.06, lambda: ran.append("last"))
    later.call(0.03, fail)
    later.call(0.0, lambda: ran.append("first"))
    assert done.wait(5)
    assert ran == ["first", "last"]


def test_a_flush_runs_everything_at_once() -> None:
    later, ran = Later(), []
    later.call(60, lambda: ran.append("b"))
    later.call(30, lambda: ran.append("a"))
    began = time.monotonic()
    later.flush()
    assert ran == ["a", "b"]
    assert time.monotonic() - began < 1
