"""Whatever joins, leaves, pauses and resumes: rows stay dense, the budget holds, and every row has its own tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.protocol import Request, SamplingParams
from workers.engine.scheduler import Plan, Scheduler

SLOTS, KV_TOKENS, CHUNK = 4, 160, 16
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 2)),
        st.tuples(st.sampled_from(["remove", "pause", "resume"]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


class Rows:
    """A cache whose contents can be looked at: it does what a plan says, with tokens for keys and values."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[-1] * KV_TOKENS for _ in range(SLOTS)]

    def run(self, plan: Plan) -> None:
        for move in plan.moves:
            self.rows[move.target][: move.length] = self.rows[move.source][: move.length]
        fed = [(sequence, 1) for sequence in plan.decode] + [(chunk.sequence, chunk.length) for chunk in plan.prefill]
        for row, (sequence, length) in enumerate(fed):
            self.rows[row][sequence.cached : sequence.cached + length] = sequence.fed(length)

    def check(self, plan: Plan) -> None:
        running = [*plan.decode, *(chunk.sequence for chunk in plan.prefill)]
        for row, sequence in enumerate(running):
            tokens = [*sequence.request.prompt, *sequence.output]
            assert self.rows[row][: sequence.cached] == tokens[: sequence.cached]
            assert sequence.cached <= plan.longest


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    assert plan.rows == scheduler.running <= SLOTS
    assert plan.rows * plan.longest <= KV_TOKENS
    assert sum(chunk.length for chunk in plan.prefill) <= CHUNK
    assert all(sequence.total == sequence.cached + 1 for sequence in plan.decode)
    assert all(chunk.completes for chunk in plan.prefill) or len(plan.prefill) == 1
    assert bool(plan) == bool(plan.rows)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_every_row_holds_the_tokens_of_its_sequence(actions: list[tuple[str, int, int]]) -> None:
    scheduler, cache = Scheduler(SLOTS, KV_TOKENS, CHUNK), Rows()
    added = 0
    for action, number, priority in actions:
        if action == "add":
            prompt = tuple(range(1000 * added, 1000 * added + number))
            request = Request(str(added), prompt, sampling=SamplingParams(max_tokens=20), priority=priority)
            scheduler.add(request, need=number + 20)
            added += 1
        elif action == "step":
            plan = scheduler.schedule()
            check_plan(scheduler, plan)
            cache.run(plan)
            ready = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.completes)]
            scheduler.advance(plan)
            cache.check(plan)
            for sequence in ready:
                sequence.output.append(len(sequence.output))
                if len(sequence.output) == 20:
                    scheduler.remove(sequence.request.seq)
        else:
            getattr(scheduler, action)(str(number))


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = Scheduler(slots=4, kv_tokens=100, prefill_chunk=16)
    scheduler.add(Request("small", (1,)), need=40)
    scheduler.schedule()
    scheduler.add(Request("large", (1,)), need=90)
    scheduler.add(Request("next", (1,)), need=10)
    scheduler.schedule()
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    scheduler.remove("small")
    scheduler.schedule()
    assert next(iter(scheduler)).request.seq == "large"
    assert scheduler.running == 1


def test_a_resumed_sequence_has_not_lost_its_place() -> None:
    scheduler = Scheduler(slots=1, kv_tokens=100, prefill_chunk=16)
    for seq in ("a", "b"):
        scheduler.add(Request(seq, (1,)), need=10)
    scheduler.pause("a")
    scheduler.resume("a")
    plan = scheduler.schedule()
    assert [chunk.sequence.request.seq for chunk in plan.prefill] == ["a"]
