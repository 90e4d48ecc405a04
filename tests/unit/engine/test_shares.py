"""Shares: over any while, each flow that asks gets what its weight says, and nobody saves up."""

from __future__ import annotations

from collections import Counter

from workers.engine.shares import Flow


def served(shares: Flow[str], names: dict[str, tuple[object, ...]], rounds: int) -> Counter[str]:
    """Who gets how much when each turn is worth one."""
    got: Counter[str] = Counter()
    for _ in range(rounds):
        leaf = shares.first(lambda _: True)
        assert leaf is not None
        got[leaf] += 1
        shares.charge(names[leaf], 1.0)
    return got


def test_weights_are_kept_at_every_level() -> None:
    shares: Flow[str] = Flow()
    names: dict[str, tuple[object, ...]] = {}
    flows = {
        "a1": (("fast", 3.0), ("ann", 1.0), ("a1", 1.0)),
        "a2": (("fast", 3.0), ("ann", 1.0), ("a2", 1.0)),
        "b1": (("fast", 3.0), ("bob", 2.0), ("b1", 1.0)),
        "c1": (("slow", 1.0), ("ann", 1.0), ("c1", 1.0)),
    }
    for leaf, path in flows.items():
        shares.add(path, leaf)
        names[leaf] = tuple(name for name, _ in path)
    got = served(shares, names, 1200)
    # Three quarters for the fast one, of which bob gets two thirds; ann's two share the rest.
    assert {leaf: round(count / 10) for leaf, count in got.items()} == {"b1": 60, "a1": 15, "a2": 15, "c1": 30}


def test_who_was_away_has_saved_nothing() -> None:
    shares: Flow[str] = Flow()
    names: dict[str, tuple[object, ...]] = {"a": ("a",), "b": ("b",)}
    shares.add((("a", 1.0),), "a")
    served(shares, names, 1000)
    shares.add((("b", 1.0),), "b")
    assert abs(served(shares, names, 10)["a"] - 5) <= 1


def test_who_wants_nothing_is_passed_over() -> None:
    shares: Flow[str] = Flow()
    shares.add((("a", 1.0),), "a")
    shares.add((("b", 1.0),), "b")
    shares.charge(("b",), 5)
    assert shares.first(lambda leaf: leaf == "b") == "b"
    assert shares.first(lambda leaf: False) is None
    shares.remove(("a",))
    assert shares.first(lambda _: True) == "b"
