"""Whatever joins, leaves, pauses, resumes and is guessed: rows stay dense, the budget holds, and every row has its own
tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.prefix import BLOCK
from workers.engine.protocol import Request, SamplingParams, Tokens
from workers.engine.scheduler import Keep, Plan, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.speculation import Costs, Speculation

SLOTS, KV_TOKENS, CHUNK = 4, 480, 16
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 180), st.integers(0, 2)),
        st.tuples(st.sampled_from(["remove", "pause", "resume", "let_go"]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("steps"), st.integers(1, 8), st.just(0)),
    ),
    max_size=80,
)


class Rows:
    """A cache whose contents can be looked at: it does what a plan says, with tokens for keys and values."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[-1] * KV_TOKENS for _ in range(SLOTS)]
        self.blocks: dict[int, list[int]] = {}

    def run(self, plan: Plan) -> None:
        for move in plan.moves:
            if isinstance(move, Keep):
                for block, start in move.copies:
                    self.blocks[block] = self.rows[move.row][start : start + BLOCK]
            else:
                self.rows[move.target][: move.length] = self.rows[move.source][: move.length]
        for restore in plan.restores:
            kept = [token for block in restore.blocks for token in self.blocks[block]]
            self.rows[restore.row][restore.start : restore.start + len(kept)] = kept
        decoded = [(each, each.fed(1) + draft) for each, draft in zip(plan.decode, plan.drafts, strict=True)]
        fed = decoded + [(chunk.sequence, chunk.sequence.fed(chunk.length)) for chunk in plan.prefill]
        for row, (sequence, tokens) in enumerate(fed):
            assert sequence.cached + len(tokens) <= plan.longest
            self.rows[row][sequence.cached : sequence.cached + len(tokens)] = tokens

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


def said(sequence: Sequence, position: int) -> int:
    """What a sequence says there, and no other says: much of it can be guessed, and some of it cannot."""
    return -10 - 100 * sequence.arrival - (position if position % 9 == 0 else position % 2)


def right(sequence: Sequence, draft: Tokens) -> int:
    """How many tokens of a draft are what it says there."""
    start = len(sequence.output)
    return next((n for n, token in enumerate(draft) if token != said(sequence, start + n)), len(draft))


def step(scheduler: Scheduler, cache: Rows) -> None:
    plan = scheduler.schedule()
    check_plan(scheduler, plan)
    cache.run(plan)
    good = [(sequence, right(sequence, draft)) for sequence, draft in zip(plan.decode, plan.drafts, strict=True)]
    ready = [*good, *((chunk.sequence, 0) for chunk in plan.prefill if chunk.completes)]
    scheduler.advance(plan, right=[sequence for sequence, count in good for _ in range(count)])
    for sequence, count in ready:
        sequence.output += [said(sequence, len(sequence.output) + n) for n in range(count + 1)]
    cache.check(plan)
    for sequence, _ in ready:
        if len(sequence.output) == 20:  # no guess goes beyond it
            scheduler.remove(sequence.request.seq)


@settings(max_examples=400, deadline=None)
@given(ACTIONS, st.sampled_from([0, 5 * BLOCK, 20 * BLOCK]), st.booleans())
def test_every_row_holds_the_tokens_of_its_sequence(
    actions: list[tuple[str, int, int]], prefix_tokens: int, guesses: bool
) -> None:
    speculation = Speculation(Costs.through((1, 1.0), (2, 1.0)), KV_TOKENS) if guesses else None
    scheduler, cache = Scheduler(SLOTS, KV_TOKENS, CHUNK, prefix_tokens, speculation), Rows()
    added = 0
    for action, number, priority in actions:
        if action == "add":
            family = 1000 * (number % 3)  # many begin alike
            prompt = tuple(range(family, family + number))
            request = Request(str(added), prompt, sampling=SamplingParams(max_tokens=20), priority=priority)
            scheduler.add(request, need=number + 20)
            added += 1
        elif action == "steps":
            for _ in range(number):
                step(scheduler, cache)
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


def first_step(scheduler: Scheduler, seq: str, prompt: tuple[int, ...], tenant: str = "") -> Plan:
    """Steps until a sequence's prompt is complete and removes it; the plan that it began with."""
    scheduler.add(Request(seq, prompt, tenant=tenant), need=len(prompt) + 10)
    began = plan = scheduler.schedule()
    while not plan.prefill[0].completes:
        scheduler.advance(plan)
        plan = scheduler.schedule()
    scheduler.advance(plan)
    scheduler.remove(seq)
    return began


def test_a_prompt_that_begins_like_another_is_fed_from_where_they_part() -> None:
    scheduler = Scheduler(slots=1, kv_tokens=1000, prefill_chunk=500, prefix_tokens=20 * BLOCK)
    shared = tuple(range(3 * BLOCK + 5))
    first_step(scheduler, "a", (*shared, 1000))
    (chunk,) = first_step(scheduler, "b", (*shared, 2000, 2001)).prefill
    assert (chunk.length, scheduler.reused_tokens) == (5 + 2, 3 * BLOCK)


def test_the_last_token_of_a_prompt_is_always_fed() -> None:
    scheduler = Scheduler(slots=1, kv_tokens=1000, prefill_chunk=500, prefix_tokens=20 * BLOCK)
    prompt = tuple(range(2 * BLOCK))
    first_step(scheduler, "a", prompt)
    (chunk,) = first_step(scheduler, "b", prompt).prefill
    assert chunk.length == BLOCK


def test_nothing_is_shared_between_tenants() -> None:
    scheduler = Scheduler(slots=1, kv_tokens=1000, prefill_chunk=500, prefix_tokens=20 * BLOCK)
    prompt = tuple(range(3 * BLOCK))
    first_step(scheduler, "a", prompt, tenant="ann")
    (chunk,) = first_step(scheduler, "b", prompt, tenant="bob").prefill
    assert chunk.length == len(prompt)


def test_a_paused_sequence_goes_on_from_what_was_kept_of_it() -> None:
    scheduler = Scheduler(slots=1, kv_tokens=1000, prefill_chunk=500, prefix_tokens=20 * BLOCK)
    scheduler.add(Request("a", tuple(range(4 * BLOCK + 3))), need=200)
    scheduler.advance(scheduler.schedule())
    scheduler.pause("a")
    scheduler.resume("a")
    (chunk,) = scheduler.schedule().prefill
    assert chunk.length == 3


def test_of_a_sequence_that_failed_nothing_is_kept() -> None:
    scheduler = Scheduler(slots=1, kv_tokens=1000, prefill_chunk=20, prefix_tokens=20 * BLOCK)
    prompt = tuple(range(3 * BLOCK))
    scheduler.add(Request("a", prompt), need=200)
    for _ in range(2):
        scheduler.advance(scheduler.schedule())
    scheduler.remove("a", healthy=False)
    first_step(scheduler, "b", prompt)
    assert scheduler.reused_tokens == 0


def test_a_prompt_beside_others_is_taken_in_small_bites_where_they_share_a_pass() -> None:
    costs = Costs.through((1, 21.0), (2, 22.0))
    scheduler = Scheduler(slots=4, kv_tokens=4000, prefill_chunk=128, costs=costs)
    scheduler.add(Request("short", tuple(range(20))), need=120)
    fed: list[int] = []
    while sum(fed) < 520:
        plan = scheduler.schedule()
        fed.append(sum(chunk.length for chunk in plan.prefill))
        assert not plan.decode or costs.of(1 + fed[-1]) <= 2 * costs.of(1)
        ready = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.completes)]
        scheduler.advance(plan)
        for sequence in ready:
            sequence.output.append(1)
        if len(fed) == 1:
            scheduler.add(Request("long", tuple(range(500))), need=510)
    assert fed == [20, *[8] * 62, 4]
