"""Packing: batches of one length, no input lost or taken twice, and nobody who waits for a whole job of another."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.packing import Item, Packer, bucket
from workers.engine.protocol import EmbedRequest

BUDGET, WINDOW = 256, 16
VECTOR = b"v"


def ask(seq: str, lengths: list[int], **fields: object) -> EmbedRequest:
    return EmbedRequest(seq, tuple((1,) * length for length in lengths), **fields)  # type: ignore[arg-type]


def step(packer: Packer) -> list[Item]:
    """One batch, finished at once; jobs that are through leave."""
    batch = packer.next_batch()
    for item in batch:
        item.job.finish(item.place, VECTOR)
    for job in {item.job.request.seq: item.job for item in batch}.values():
        job.release()
        if job.ended:
            packer.remove(job.request.seq)
    return batch


@given(st.integers(17, 4096))
def test_a_bucket_wastes_less_than_a_fifth(length: int) -> None:
    assert length <= bucket(length) < length * 1.25
    assert bucket(bucket(length)) == bucket(length)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=60), min_size=1, max_size=6), st.integers(0, 59))
def test_every_input_is_computed_once_in_batches_of_its_own_length(jobs: list[list[int]], done: int) -> None:
    packer = Packer(BUDGET, WINDOW)
    for number, lengths in enumerate(jobs):
        packer.add(ask(str(number), lengths, done=min(done, len(lengths))))
    for job in packer:
        if job.ended:
            packer.remove(job.request.seq)
    seen: dict[str, list[int]] = {str(number): [] for number in range(len(jobs))}
    while len(packer):
        batch = step(packer)
        assert batch, "there are jobs, and nothing to do"
        longest = max(len(item.tokens) for item in batch)
        assert len(batch) == 1 or longest * len(batch) <= BUDGET
        assert {bucket(len(item.tokens)) for item in batch} == {bucket(longest)}
        for item in batch:
            assert item.place < item.job.out + WINDOW
            seen[item.job.request.seq].append(item.place)
    for number, lengths in enumerate(jobs):
        assert sorted(seen[str(number)]) == list(range(min(done, len(lengths)), len(lengths)))


def test_padding_is_a_tenth_of_what_arrival_order_needs() -> None:
    chance = random.Random(4)
    lengths = [min(256, int(chance.lognormvariate(3.3, 0.9)) + 3) for _ in range(2000)]
    packer = Packer(512, 512)
    packer.add(ask("job", lengths))
    padded = 0
    while len(packer):
        batch = step(packer)
        padded += len(batch) * max(len(item.tokens) for item in batch)
    naive = sum(32 * max(lengths[at : at + 32]) for at in range(0, len(lengths), 32))
    assert padded < 1.1 * sum(lengths)
    assert padded - sum(lengths) < 0.1 * (naive - sum(lengths))


def test_a_short_input_is_in_the_next_batch_whatever_is_there() -> None:
    packer = Packer(BUDGET, WINDOW)
    packer.add(ask("large", [200] * 2048, tenant="ann"))
    for _ in range(10):
        step(packer)
    packer.add(ask("one", [5], tenant="bob"))
    packer.add(ask("same tenant", [200], tenant="ann"))
    served = [{item.job.request.seq for item in step(packer)} for _ in range(3)]
    assert "one" in served[0] | served[1]
    assert "same tenant" in served[0] | served[1] | served[2]


def test_a_batch_that_its_leader_does_not_fill_takes_others_along() -> None:
    packer = Packer(BUDGET, WINDOW)
    packer.add(ask("a", [30]))
    packer.add(ask("b", [31, 200]))
    assert [(item.job.request.seq, item.place) for item in step(packer)] == [("a", 0), ("b", 0)]


def test_lanes_get_their_shares() -> None:
    packer = Packer(BUDGET, WINDOW)
    for lane in range(3):
        packer.add(ask(str(lane), [64] * 20_000, priority=lane))
    got = {"0": 0, "1": 0, "2": 0}
    for _ in range(400):
        for item in step(packer):
            got[item.job.request.seq] += 1
    total = sum(got.values())
    assert got["0"] / total == pytest.approx(13 / 16, abs=0.02)
    assert got["1"] / total == pytest.approx(2 / 16, abs=0.02)
    assert got["2"] / total == pytest.approx(1 / 16, abs=0.02)


def test_a_paused_job_leaves_its_turn_to_others() -> None:
    packer = Packer(BUDGET, WINDOW)
    packer.add(ask("a", [8] * 4))
    packer.pause("a")
    assert packer.idle
    assert step(packer) == []
    packer.resume("a")
    assert [item.place for item in step(packer)] == [0, 1, 2, 3]
    assert packer.idle
