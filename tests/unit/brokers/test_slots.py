"""Where a Cluster's commands go, and where they go next when a server says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError
from redis.exceptions import ConnectionError as NotConnected

from brokers.address import Node
from brokers.slots import Round, SlotMap, key_of

A, B = Node("a", 1), Node("b", 2)
KEY = "lb:{p00}:job"
SLOT = key_slot(KEY.encode())
GET = ("GET", KEY)


@pytest.fixture
def slots() -> SlotMap:
    """Slots below that of KEY, and it, are A's; those above are B's; each has a replica."""
    slots = SlotMap([A])
    slots.read([[0, SLOT, [b"a", 1, b"id"], [b"c", 3, b"id"]], [SLOT + 1, 16383, [b"b", 2, b"id"]]], A)
    return slots


def sent(rounds: Round, answer: Any) -> dict[Node, list[Any]]:
    """One trip: every server answers all its packets with `answer`."""
    plan = rounds.plan()
    packets = {node: rounds.packets(indexes) for node, indexes in plan.items()}
    for node, indexes in plan.items():
        rounds.take(node, indexes, [answer] * len(packets[node]))
    return packets


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("FCALL", "lb1_claim", 3, "k1", "k2", "k3", "arg"), "k1"),
        (("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", "k1", "k2", "0", "0"), "k1"),
        (("HGET", "k1", "f"), "k1"),
        (("PING",), None),
    ],
)
def test_the_key_of_a_command(command: tuple[Any, ...], key: str | None) -> None:
    assert key_of(command) == key


def test_commands_go_to_the_primaries_of_their_slots(slots: SlotMap) -> None:
    assert slots.node_of(GET) == A
    assert slots.primaries == (A, B)
    assert slots.nodes == (A, Node("c", 3), B)
    assert not slots.due


def test_a_server_without_a_name_is_the_one_that_was_asked() -> None:
    slots = SlotMap([A])
    slots.read([[0, 16383, [b"", 9, b"id"]]], A)
    assert slots.primaries == (Node("a", 9),)


def test_moved_is_followed_and_remembered(slots: SlotMap) -> None:
    rounds = Round(slots, [GET, GET])
    assert sent(rounds, MovedError(f"{SLOT} b:2")) == {A: [GET, GET]}
    assert sent(rounds, b"value") == {B: [GET, GET]}
    assert rounds.plan() == {}
    assert rounds.replies == [b"value", b"value"]
    assert slots.node_of(GET) == B
    assert slots.due


def test_ask_is_followed_once_with_its_word_of_admittance(slots: SlotMap) -> None:
    rounds = Round(slots, [GET])
    sent(rounds, AskError(f"{SLOT} b:2"))
    assert sent(rounds, b"value") == {B: [("ASKING",), GET]}
    assert rounds.replies == [b"value"]
    assert slots.node_of(GET) == A


def test_a_server_that_is_away_fails_its_own_commands_and_is_asked_about(slots: SlotMap) -> None:
    other = ("GET", next(f"{{{n}}}" for n in range(1000) if key_slot(f"{{{n}}}".encode()) > SLOT))
    rounds = Round(slots, [GET, other])
    plan = rounds.plan()
    rounds.fail(A, plan[A], NotConnected("away"))
    rounds.take(B, plan[B], [b"value"])
    assert isinstance(rounds.replies[0], NotConnected)
    assert rounds.replies[1] == b"value"
    assert rounds.plan() == {}
    assert slots.due


def test_a_question_to_anybody_is_asked_again_elsewhere(slots: SlotMap) -> None:
    rounds = Round(slots, [("PING",)])
    for _ in range(50):  # each time a server is drawn
        ((node, indexes),) = rounds.plan().items()
        if node == B:
            break
        rounds.fail(node, indexes, NotConnected("away"))
    rounds.take(B, indexes, [b"PONG"])
    assert rounds.replies == [b"PONG"]
    assert rounds.plan() == {}


def test_a_refusal_is_final_and_only_some_say_that_the_cluster_changed(slots: SlotMap) -> None:
    rounds = Round(slots, [GET])
    sent(rounds, ResponseError("wrong type"))
    assert rounds.plan() == {}
    assert not slots.due
    slots.learn(A, ClusterDownError("Hash slot not served"))
    assert slots.due


def test_a_slot_that_nobody_serves_fails_its_commands(slots: SlotMap) -> None:
    slots.read([[SLOT + 1, 16383, [b"b", 2, b"id"]]], B)
    rounds = Round(slots, [GET])
    assert rounds.plan() == {}
    assert isinstance(rounds.replies[0], NotConnected)
    assert slots.due
