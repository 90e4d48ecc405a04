"""Weighted fair shares: whoever got least for its weight is next. No tensors, no clock.

Flows form a tree, here lanes, their tenants, their jobs. Each flow's clock is what it was given, divided by its weight,
and of siblings the one with the earliest clock goes first (start-time fair queueing, Goyal 1996). A flow that comes
back after it had nothing to do starts at its siblings' time: it is owed nothing for the time in which it asked for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Leaf = TypeVar("Leaf")


class Flow(Generic[Leaf]):
    """One flow: a leaf with something to do, or siblings that share what it gets."""

    def __init__(self, weight: float = 1.0, leaf: Leaf | None = None) -> None:
        self.leaf = leaf
        self._weight = weight
        self._clock = 0.0
        self._now = 0.0  # of the children: the latest clock at which one of them was served
        self._children: dict[Hashable, Flow[Leaf]] = {}

    def add(self, path: tuple[tuple[Hashable, float], ...], leaf: Leaf) -> None:
        """Put a leaf at a path of (name, weight); what is not there on the way is made."""
        (name, weight), *rest = path
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = Flow(weight, None if rest else leaf)
            child._clock = self._now
        if rest:
            child.add(tuple(rest), leaf)

    def remove(self, names: tuple[Hashable, ...]) -> None:
        """Take the leaf at that path out, and what is empty then."""
        name, *rest = names
        child = self._children.get(name)
        if child is None:
            return
        if rest:
            child.remove(tuple(rest))
        if not child._children:
            del self._children[name]

    def first(self, wants: Callable[[Leaf], bool]) -> Leaf | None:
        """The leaf that is next, of those that want to be."""
        if self.leaf is not None:
            return self.leaf if wants(self.leaf) else None
        for child in sorted(self._children.values(), key=lambda child: child._clock):
            if (found := child.first(wants)) is not None:
                return found
        return None

    def charge(self, names: tuple[Hashable, ...], amount: float) -> None:
        """The leaf at that path was given so much."""
        name, *rest = names
        child = self._children[name]
        self._now = max(self._now, child._clock)
        child._clock += amount / child._weight
        if rest:
            child.charge(tuple(rest), amount)
