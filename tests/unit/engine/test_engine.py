"""One suite for every engine: what the protocol promises, over the scripted and the transformers engine."""

from __future__ import annotations

import pytest

from tests.unit.engine.conftest import EngineFactory
from tests.unit.engine.driving import GREEDY, Record, ask, drain, prompt, run, step_until
from workers.engine.protocol import Request, SamplingParams

SAMPLED = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=7, ignore_eos=True)
EACH_SAMPLING = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def test_it_generates_max_tokens_and_says_length(make_engine: EngineFactory) -> None:
    record = run(make_engine(), ask("a"))
    assert len(record.tokens["a"]) == 12
    assert record.finish("a") == "length"


@EACH_SAMPLING
def test_batch_mates_that_join_and_leave_change_nothing(make_engine: EngineFactory, sampling: SamplingParams) -> None:
    alone = run(make_engine(), ask("a", sampling=sampling)).tokens["a"]
    engine, record = make_engine(), Record()
    engine.submit(ask("early", "a much longer prompt than the others have", SamplingParams(max_tokens=5)))
    step_until(engine, record, "early", 2)
    engine.submit(ask("a", sampling=sampling))
    step_until(engine, record, "a", 4)
    engine.submit(ask("late", "x", SamplingParams(max_tokens=30, ignore_eos=True)))
    assert drain(engine, record).tokens["a"] == alone


@EACH_SAMPLING
@pytest.mark.parametrize("at", [1, 5, 11])
def test_what_resumes_from_tokens_equals_what_was_never_interrupted(
    make_engine: EngineFactory, sampling: SamplingParams, at: int
) -> None:
    whole = run(make_engine(), ask("a", sampling=sampling)).tokens["a"]
    resumed = run(make_engine(), ask("a", sampling=sampling, output=tuple(whole[:at])))
    assert resumed.tokens["a"] == whole[at:]
    assert resumed.finish("a") == "length"


@EACH_SAMPLING
def test_a_paused_sequence_frees_its_slot_and_goes_on_unchanged(
    make_engine: EngineFactory, sampling: SamplingParams
) -> None:
    whole = run(make_engine(), ask("a", sampling=sampling)).tokens["a"]
    engine, record = make_engine(slots=1), Record()
    engine.submit(ask("a", sampling=sampling))
    step_until(engine, record, "a", 3)
    engine.pause("a")
    engine.submit(ask("b"))
    drain(engine, record)
    assert record.finish("b") == "length"
    assert len(record.tokens["a"]) == 3
    assert engine.stats().paused == 1
    engine.resume("a")
    assert drain(engine, record).tokens["a"] == whole


def test_an_aborted_sequence_ends_at_once_and_frees_its_slot(make_engine: EngineFactory) -> None:
    engine, record = make_engine(slots=1), Record()
    engine.submit(ask("a", sampling=SamplingParams(max_tokens=1000, ignore_eos=True)))
    engine.submit(ask("b"))
    step_until(engine, record, "a", 2)
    assert engine.stats().waiting == 1
    engine.abort("a")
    record.take(engine.step())
    assert record.finish("a") == "cancelled"
    assert len(record.tokens["a"]) == 2
    assert engine.stats().running == 1
    assert drain(engine, record).finish("b") == "length"


def test_aborting_works_in_the_queue_and_on_pause_and_ignores_strangers(make_engine: EngineFactory) -> None:
    engine = make_engine(slots=1)
    engine.submit(ask("a"))
    engine.submit(ask("waiting"))
    engine.submit(ask("paused"))
    engine.pause("paused")
    for seq in ("waiting", "paused", "stranger"):
        engine.abort(seq)
    record = drain(engine, Record())
    assert {seq: record.finish(seq) for seq in record.ends} == {
        "a": "length",
        "waiting": "cancelled",
        "paused": "cancelled",
    }


def test_lower_priority_numbers_go_first_then_who_came_first(make_engine: EngineFactory) -> None:
    engine = make_engine(slots=1)
    record = run(
        engine, ask("late", priority=5), ask("first", priority=1), ask("second", priority=1), ask("urgent", priority=0)
    )
    assert record.order == ["urgent", "first", "second", "late"]


def test_a_sequence_past_its_deadline_expires_wherever_it_is(make_engine: EngineFactory) -> None:
    now = 100.0
    engine, record = make_engine(slots=1, clock=lambda: now), Record()
    for seq in ("running", "waiting", "paused"):
        engine.submit(ask(seq, sampling=SamplingParams(max_tokens=400, ignore_eos=True), deadline=110.0))
    engine.pause("paused")
    step_until(engine, record, "running", 3)
    now = 110.0
    record.take(engine.step())
    assert {record.finish(seq) for seq in ("running", "waiting", "paused")} == {"expired"}
    assert engine.idle


def test_only_a_deadline_wakes_a_paused_engine(make_engine: EngineFactory) -> None:
    now = 100.0
    engine = make_engine(clock=lambda: now)
    engine.submit(ask("a", deadline=110.0))
    engine.pause("a")
    assert engine.idle
    now = 111.0
    assert not engine.idle


def test_stats_count_what_happened(make_engine: EngineFactory) -> None:
    now = 50.0
    engine, record = make_engine(slots=2, clock=lambda: now), Record()
    assert engine.stats().last_token_age_s is None
    for seq in ("a", "b", "c"):
        engine.submit(ask(seq))
    step_until(engine, record, "a", 2)
    now = 53.0
    stats = engine.stats()
    assert (stats.slots, stats.running, stats.waiting, stats.paused) == (2, 2, 1, 0)
    assert stats.last_token_age_s == 3.0
    assert 0 < stats.kv_tokens_used < stats.kv_tokens_total == 2048
    drain(engine, record)
    stats = engine.stats()
    assert (stats.running, stats.kv_tokens_used, stats.generated_tokens) == (0, 0, 36)
    assert stats.prefilled_tokens == 3 * len(prompt("the sea"))
    assert stats.steps >= 24


BAD = {
    "bad_token": Request("bad", (1, 999_999), sampling=GREEDY),
    "negative_token": Request("bad", (-1,), sampling=GREEDY),
    "bad_output": Request("bad", (1,), output=(999_999,), sampling=GREEDY),
    "empty_prompt": Request("bad", (), sampling=GREEDY),
    "context_exceeded": Request("bad", (65,) * 9000, sampling=GREEDY),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_bad_request_fails_alone(make_engine: EngineFactory, kind: str) -> None:
    expected = run(make_engine(), ask("good")).tokens["good"]
    engine, record = make_engine(), Record()
    engine.submit(ask("good"))
    step_until(engine, record, "good", 2)
    engine.submit(BAD[kind])
    drain(engine, record)
    assert record.tokens["good"] == expected
    assert record.finish("bad") == "error"
    assert record.ends["bad"].error_code in {kind, "bad_token"}
    assert record.tokens["bad"] == []


def test_a_second_sequence_of_a_live_id_is_refused_and_the_first_goes_on(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.submit(ask("a"))
    engine.submit(ask("a", "another"))
    (refusal,) = [output for output in engine.step() if output.finish]
    assert refusal.error_code == "duplicate_sequence"
    assert len(drain(engine, Record()).tokens["a"]) >= 11


def test_a_full_context_ends_with_length(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_tokens=64)
    record = run(engine, ask("a", "x" * 60, SamplingParams(max_tokens=500, ignore_eos=True)))
    assert len(record.tokens["a"]) == 4
    assert record.finish("a") == "length"
    assert engine.capabilities.max_context == 64


def test_what_was_already_over_ends_without_a_token(make_engine: EngineFactory) -> None:
    record = run(make_engine(), ask("a", output=(65,) * 12))
    assert record.tokens["a"] == []
    assert record.finish("a") == "length"


def test_a_long_prompt_does_not_stall_who_is_decoding(make_engine: EngineFactory) -> None:
    engine, record = make_engine(), Record()
    engine.submit(ask("a", sampling=SamplingParams(max_tokens=40, ignore_eos=True)))
    step_until(engine, record, "a", 2)
    engine.submit(ask("long", "x" * 480))
    before = len(record.tokens["a"])
    step_until(engine, record, "long", 1)
    chunks = -(-480 // engine._model.prefill_chunk)
    assert chunks > 1
    assert len(record.tokens["a"]) == before + chunks


def test_more_than_fits_waits_for_room(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_tokens=100)
    for seq in ("a", "b", "c"):
        engine.submit(ask(seq, sampling=SamplingParams(max_tokens=40, ignore_eos=True)))  # 47 tokens each
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    record = drain(engine, Record())
    assert {record.finish(seq) for seq in ("a", "b", "c")} == {"length"}


def test_seed_and_choice_make_different_texts(make_engine: EngineFactory) -> None:
    other_seed = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=8, ignore_eos=True)
    record = run(
        make_engine(),
        ask("a", sampling=SAMPLED),
        ask("again", sampling=SAMPLED),
        ask("choice", sampling=SAMPLED, choice=1),
        ask("seed", sampling=other_seed),
    )
    assert record.tokens["a"] == record.tokens["again"]
    assert record.tokens["a"] != record.tokens["choice"]
    assert record.tokens["a"] != record.tokens["seed"]


def test_many_sequences_of_all_lengths_come_and_go(make_engine: EngineFactory) -> None:
    requests = [
        ask(str(n), "the sea " * (1 + n * 7 % 23), SamplingParams(max_tokens=3 + n * 5 % 31, temperature=0))
        for n in range(24)
    ]
    alone = {request.seq: run(make_engine(), request).tokens[request.seq] for request in requests}
    engine, record = make_engine(), Record()
    for n, request in enumerate(requests):
        engine.submit(request)
        for _ in range(n % 4):
            record.take(engine.step())
        if n % 5 == 4:
            engine.pause(str(n - 1))
            engine.resume(str(n - 1))
    assert drain(engine, record).tokens == alone
