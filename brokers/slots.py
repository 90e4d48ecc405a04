"""Which server of a Redis Cluster serves which key. No I/O: the two clients in cluster.py ask and tell."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as NotConnected

from brokers.address import Node

Command = tuple[Any, ...]

_LOOK_EVERY_S = 0.2
_KEYLESS = frozenset({"PING", "INFO", "TIME", "FUNCTION"})
_ASKING = ("ASKING",)
_MOVES = (MovedError, ClusterDownError, ReadOnlyError)


def key_of(command: Command) -> str | None:
    """The key by which a command finds its server; None for one that any server answers."""
    match command[0]:
        case "FCALL":
            return str(command[3])
        case "XREAD":
            return str(command[command.index("STREAMS") + 1])
        case name if name in _KEYLESS:
            return None
        case _:
            return str(command[1])


class SlotMap:
    """The primaries by slot, as far as they are known, and when to ask for them again."""

    def __init__(self, seeds: Sequence[Node]) -> None:
        self._seeds = tuple(seeds)
        self._by_slot: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._known: tuple[Node, ...] = ()
        self._stale = True
        self._looked_at = 0.0
        self.primaries: tuple[Node, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.primaries

    @property
    def due(self) -> bool:
        """Whether somebody should ask the Cluster now how it stands."""
        return self._stale and time.monotonic() - self._looked_at >= _LOOK_EVERY_S

    def looking(self) -> None:
        self._looked_at = time.monotonic()

    def candidates(self) -> list[Node]:
        """Whom to ask, in any order: a server that is cut off would tell an old story for ever."""
        nodes = list({*self._known, *self._seeds})
        random.shuffle(nodes)
        return nodes

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Primaries and replicas."""
        return self._known

    def read(self, reply: Any, asked: Node) -> None:
        """Take in the answer to CLUSTER SLOTS."""
        by_slot: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        known: dict[Node, None] = {}
        primaries: dict[Node, None] = {}
        for first, last, *served_by in reply:
            nodes = [_node(raw, asked) for raw in served_by]
            by_slot[first : last + 1] = [nodes[0]] * (last + 1 - first)
            primaries[nodes[0]] = None
            known |= dict.fromkeys(nodes)
        self._by_slot, self._known, self.primaries = by_slot, tuple(known), tuple(primaries)
        self._stale = not primaries

    def node_of(self, command: Command) -> Node:
        """Raises ConnectionError when no server is known to serve the command's key."""
        key = key_of(command)
        if key is None:
            if self.empty:
                raise NotConnected("no server of the Cluster is known")
            return random.choice(self.primaries)  # noqa: S311
        return self.of_key(key)

    def of_key(self, key: str) -> Node:
        node = self._by_slot[key_slot(key.encode())]
        if node is None:
            self._stale = True
            raise NotConnected("no server of the Cluster is known for this key")
        return node

    def learn(self, node: Node, error: Exception) -> None:
        """A server's error may say how the Cluster stands now."""
        if isinstance(error, AskError):
            error.host = error.host or node.host  # none means the one that was asked
        if isinstance(error, MovedError):
            self._by_slot[error.slot_id] = Node(error.host, error.port)
        if isinstance(error, _MOVES) or not isinstance(error, ResponseError):
            self._stale = True


class Round:
    """Commands on their way to their servers and back, followed over redirects.

    A command has run only if its reply is neither MOVED nor ASK, so following those never does anything twice.
    """

    def __init__(self, slots: SlotMap, commands: Sequence[Command]) -> None:
        self._slots = slots
        self._commands = commands
        self._todo: Iterable[int] = range(len(commands))
        self.replies: list[Any] = [None] * len(commands)

    def plan(self) -> dict[Node, list[int]]:
        """What to send where now; empty when everything has its reply. What no server is known for fails here."""
        plan: dict[Node, list[int]] = {}
        for index in self._todo:
            try:
                plan.setdefault(self._node_of(index), []).append(index)
            except RedisError as error:
                self.replies[index] = error
        self._todo = []
        return plan

    def packets(self, indexes: Sequence[int]) -> list[Command]:
        """The commands for one server, each ASK followed by its word of admittance."""
        packets: list[Command] = []
        for index in indexes:
            if _is_ask(self.replies[index]):
                packets.append(_ASKING)
            packets.append(self._commands[index])
        return packets

    def take(self, node: Node, indexes: Sequence[int], answers: Sequence[Any]) -> None:
        """A server's replies to its packets."""
        incoming = iter(answers)
        again = []
        for index in indexes:
            if _is_ask(self.replies[index]):
                next(incoming)
            reply = self.replies[index] = next(incoming)
            if isinstance(reply, Exception):
                self._slots.learn(node, reply)
                if isinstance(reply, AskError):  # MOVED is one too
                    again.append(index)
        self._todo = [*self._todo, *again]

    def fail(self, node: Node, indexes: Sequence[int], error: Exception) -> None:
        """A server did not answer. What any other can answer as well goes to another."""
        self._slots.learn(node, error)
        for index in indexes:
            self.replies[index] = error
        self._todo = [*self._todo, *(index for index in indexes if key_of(self._commands[index]) is None)]

    def _node_of(self, index: int) -> Node:
        told = self.replies[index]
        if _is_ask(told):
            return Node(told.host, told.port)
        return self._slots.node_of(self._commands[index])


def _is_ask(reply: Any) -> bool:
    return isinstance(reply, AskError) and not isinstance(reply, MovedError)


def _node(raw: Any, asked: Node) -> Node:
    host, port = raw[0], raw[1]
    # No host, or "?", means the one that was asked.
    return Node(host.decode() if host and host != b"?" else asked.host, port)
