"""Which beginnings of sequences have their keys and values kept: an index without tensors, by blocks of tokens.

A block's key is a digest of its tokens and of all before them, so the same tokens after another beginning are another
block, and a chain is found from its start in one pass. Each tenant has a chain of its own: from how fast an answer
comes, nobody can tell what another has asked. The least recently used block goes first; since a use touches a chain
from its end to its start, no block outlives one that it follows. Blocks that are held stay, whatever is used since.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

BLOCK = 32  # tokens


class Copy(NamedTuple):
    """A block, and the position in its sequence at which it begins."""

    block: int
    start: int


class PrefixIndex:
    """Knows up to `tokens` // BLOCK blocks, numbered from 0."""

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens // BLOCK
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._held: Counter[bytes] = Counter()  # how often

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tenant: str, tokens: Sequence[int]) -> list[int]:
        """The kept blocks with which `tokens` begin."""
        keys = []
        for key in _chain(tenant, tokens):
            if key not in self._blocks:
                break
            keys.append(key)
        self._touch(keys)
        return [self._blocks[key] for key in keys]

    def keep(self, tenant: str, tokens: Sequence[int]) -> list[Copy]:
        """Keep all full blocks of `tokens` that there is room for: those to be filled, whatever they held before."""
        keys = list(_chain(tenant, tokens))
        del keys[self._capacity - len(self._held.keys() - set(keys)) :]
        self._touch([key for key in keys if key in self._blocks])
        new = []
        for number, key in enumerate(keys):
            if key not in self._blocks:
                self._blocks[key] = self._room()
                new.append(Copy(self._blocks[key], number * BLOCK))
        self._touch(keys)
        return new

    def hold(self, tenant: str, tokens: Sequence[int]) -> list[bytes]:
        """Let the kept blocks of `tokens` stay until `release`, while no more than half of all are held so."""
        keys = []
        for key in _chain(tenant, tokens):
            if key not in self._blocks or (key not in self._held and len(self._held) >= self._capacity // 2):
                break
            self._held[key] += 1
            keys.append(key)
        return keys

    def release(self, keys: list[bytes]) -> None:
        self._held.subtract(keys)
        for key in keys:
            if not self._held[key]:
                del self._held[key]

    def _room(self) -> int:
        if len(self._blocks) < self._capacity:
            return len(self._blocks)
        return self._blocks.pop(next(key for key in self._blocks if key not in self._held))

    def _touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _chain(tenant: str, tokens: Sequence[int]) -> Iterator[bytes]:
    key = blake2b(tenant.encode(), digest_size=16).digest()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = blake2b(array("q", tokens[start : start + BLOCK]).tobytes(), key=key, digest_size=16).digest()
        yield key
