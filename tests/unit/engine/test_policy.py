"""Lanes, tenants and deadlines: who is next, who goes, and that nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.conftest import EngineFactory
from tests.unit.engine.driving import Record, ask, drain, run, step_until
from workers.engine.policy import Policy
from workers.engine.protocol import Request
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

INTERACTIVE, STANDARD, BATCH = 0, 1, 2


def sequence(number: int, lane: int = BATCH, **fields: object) -> Sequence:
    request = Request(str(number), (1,), priority=lane, **fields)  # type: ignore[arg-type]
    return Sequence(request, arrival=number, need=10)


def serve(policy: Policy, waiting: list[Sequence], count: int) -> list[Sequence]:
    """Admissions one after the other, with nothing running."""
    admitted = []
    for _ in range(count):
        chosen = policy.next(waiting, [])
        assert chosen
        waiting.remove(chosen)
        policy.admitted(chosen, waiting)
        admitted.append(chosen)
    return admitted


def test_lanes_are_served_by_rank_and_none_starves() -> None:
    waiting = [sequence(number, lane) for lane in (BATCH, STANDARD, INTERACTIVE) for number in range(320)]
    lanes = [one.lane for one in serve(Policy(16), waiting, 160)]
    assert Counter(lanes) == {INTERACTIVE: 134, STANDARD: 17, BATCH: 9}
    assert lanes[:8] == [INTERACTIVE] * 8


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200))
def test_whoever_waits_is_served(lanes: list[int]) -> None:
    waiting = [sequence(number, lane) for number, lane in enumerate(lanes)]
    assert {one.arrival for one in serve(Policy(4), waiting, len(lanes))} == set(range(len(lanes)))


def test_within_a_lane_the_nearest_deadline_is_next_and_without_one_the_first_to_come() -> None:
    waiting = [sequence(0), sequence(1, deadline=90.0), sequence(2, deadline=80.0), sequence(3)]
    assert [one.arrival for one in serve(Policy(4), waiting, 4)] == [2, 1, 0, 3]


def test_tenants_share_slots_by_weight() -> None:
    policy = Policy(12)
    running: list[Sequence] = []
    waiting = [sequence(number, tenant="many") for number in range(100)]
    waiting += [sequence(100 + number, tenant="few", weight=2.0) for number in range(100)]
    for _ in range(12):
        chosen = policy.next(waiting, running)
        assert chosen
        waiting.remove(chosen)
        running.append(chosen)
    assert Counter(one.request.tenant for one in running) == {"few": 8, "many": 4}


def test_a_tenants_share_comes_before_its_deadlines() -> None:
    running = [sequence(9, tenant="hasty")]
    waiting = [sequence(0, tenant="hasty", deadline=1.0), sequence(1, tenant="calm", deadline=99.0)]
    assert Policy(4).next(waiting, running) is waiting[1]


def test_the_lowest_and_newest_go_first_and_no_lane_below_its_floor() -> None:
    running = [sequence(number, lane) for number, lane in enumerate([BATCH] * 4 + [STANDARD] * 4 + [INTERACTIVE] * 4)]
    victims = Policy(16).victims(sequence(99, INTERACTIVE), running)
    assert [one.arrival for one in victims] == [3, 2, 1, 7, 6]
    assert Policy(16).victims(sequence(99, BATCH), running) == []


LANES = st.lists(st.integers(0, 3), max_size=24)


@given(LANES, st.integers(0, 3), st.integers(1, 24), st.sets(st.integers(0, 23)))
def test_who_goes_is_of_a_lower_lane_has_not_been_promised_to_stay_and_leaves_others_their_floor(
    lanes: list[int], lane: int, slots: int, staying: set[int]
) -> None:
    running = [sequence(number, each) for number, each in enumerate(lanes)]
    for one in running:
        one.stays = one.arrival in staying
    victims = Policy(slots).victims(sequence(99, lane), running)
    assert all(one.lane > lane and not one.stays for one in victims)
    assert victims == sorted(victims, key=lambda one: (-one.lane, -one.arrival))
    left = Counter(one.lane for one in running if one not in victims)
    for each in {one.lane for one in victims}:
        assert left[each] >= slots // (8 if each == STANDARD else 16)


def test_nobody_goes_in_vain() -> None:
    scheduler = Scheduler(slots=4, kv_tokens=100, prefill_chunk=16)
    scheduler.add(Request("bulk", (1,), priority=BATCH), need=40)
    scheduler.schedule()
    scheduler.add(Request("larger than all", (1,), priority=INTERACTIVE), need=101)
    scheduler.schedule()
    assert (scheduler.running, scheduler.preempted) == (1, 0)


def test_bulk_work_is_sent_back_for_an_interactive_sequence_and_says_the_same(make_engine: EngineFactory) -> None:
    alone = run(make_engine(prefix_tokens=512), *(ask(str(n), f"bulk {n}", priority=BATCH) for n in range(2)))
    engine, record = make_engine(slots=2, prefix_tokens=512), Record()
    for number in range(2):
        engine.submit(ask(str(number), f"bulk {number}", priority=BATCH))
    step_until(engine, record, "1", 4)
    engine.submit(ask("quick", "now", priority=INTERACTIVE))
    step_until(engine, record, "quick", 12)
    assert "1" not in record.ends
    drain(engine, record)
    assert engine.stats().preempted == 1
    assert {seq: record.tokens[seq] for seq in alone.tokens} == alone.tokens


def test_bulk_work_whose_turn_has_come_is_not_sent_back(make_engine: EngineFactory) -> None:
    """With one slot, which interactive sequences would always take."""
    engine, record = make_engine(slots=1), Record()
    engine.submit(ask("bulk", priority=BATCH))
    for number in range(40):
        engine.submit(ask(f"quick {number}", priority=INTERACTIVE))
    drain(engine, record)
    ends = list(record.ends)
    assert ends.index("bulk") == 16
