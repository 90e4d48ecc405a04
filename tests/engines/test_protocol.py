"""What protocol.Engine promises, over every engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from tests.engines.driving import Driver
from tests.random_llama import POISON
from tests.unit.engine.driving import GREEDY, ask, prompt
from workers.engine.protocol import Request, SamplingParams
from workers.engine.text import TextStage
from workers.weights.scripted import byte_tokenizer

Make = Callable[..., Driver]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=7, ignore_eos=True)
LONG_ENOUGH = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=24, temperature=0, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.9
)
EACH_SAMPLING = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def require_keyed(driver: Driver, sampling: SamplingParams) -> None:
    if sampling.temperature and not driver.engine.capabilities.keyed_sampling:
        pytest.skip("this engine's draws depend on more than seed, position and choice")


def test_it_generates_max_tokens_and_says_length(make: Make) -> None:
    record = make().run(ask("a"))
    assert len(record.tokens["a"]) == 12
    assert record.finish("a") == "length"


@EACH_SAMPLING
def test_batch_mates_that_join_and_leave_change_nothing(make: Make, sampling: SamplingParams) -> None:
    alone = make().run(ask("a", sampling=sampling)).tokens["a"]
    driver = make()
    driver.submit(ask("early", "a much longer prompt than the others have", SamplingParams(max_tokens=5)))
    driver.until_tokens("early", 2)
    driver.submit(ask("a", sampling=sampling))
    driver.until_tokens("a", 4)
    driver.submit(ask("late", "x", SamplingParams(max_tokens=30, ignore_eos=True)))
    assert driver.drain().tokens["a"] == alone


@EACH_SAMPLING
@pytest.mark.parametrize("at", [1, 5, 11])
def test_what_resumes_from_tokens_equals_what_was_never_interrupted(
    make: Make, sampling: SamplingParams, at: int
) -> None:
    driver = make()
    require_keyed(driver, sampling)
    whole = driver.run(ask("a", sampling=sampling)).tokens["a"]
    resumed = make().run(ask("a", sampling=sampling, output=tuple(whole[:at])))
    assert resumed.tokens["a"] == whole[at:]
    assert resumed.finish("a") == "length"


def test_a_sampled_text_that_resumes_has_the_length_that_was_asked_for(make: Make) -> None:
    whole = make().run(ask("a", sampling=SAMPLED)).tokens["a"]
    assert len(make().run(ask("a", sampling=SAMPLED, output=tuple(whole[:5]))).tokens["a"]) == 7


@pytest.mark.parametrize("at", [1, 9, 20])
def test_penalties_count_what_was_generated_before(make: Make, at: int) -> None:
    whole = make().run(ask("a", sampling=PENALISED)).tokens["a"]
    resumed = make().run(ask("a", sampling=PENALISED, output=tuple(whole[:at])))
    assert resumed.tokens["a"] == whole[at:]


@EACH_SAMPLING
def test_a_paused_sequence_frees_its_slot_and_goes_on_unchanged(make: Make, sampling: SamplingParams) -> None:
    driver = make(slots=1)
    require_keyed(driver, sampling)
    whole = driver.run(ask("a", sampling=sampling)).tokens["a"]
    driver = make(slots=1)
    driver.submit(ask("a", sampling=sampling))
    driver.until_tokens("a", 3)
    driver.pause("a")
    seen = len(driver.record.tokens["a"])
    record = driver.run(ask("b"))
    assert record.finish("b") == "length"
    assert len(record.tokens["a"]) == seen
    assert driver.engine.stats().paused == 1
    driver.resume("a")
    assert driver.drain().tokens["a"] == whole


def test_an_aborted_sequence_ends_at_once_and_frees_its_slot(make: Make) -> None:
    driver = make(slots=1)
    driver.submit(ask("a", sampling=LONG), ask("b"))
    driver.until_tokens("a", 2)
    assert driver.engine.stats().waiting == 1
    driver.engine.abort("a")
    seen = len(driver.record.tokens["a"])
    driver.step()
    assert driver.record.finish("a") == "cancelled"
    assert len(driver.record.tokens["a"]) == seen
    assert driver.engine.stats().running == 1
    assert driver.drain().finish("b") == "length"


def test_aborting_works_in_the_queue_and_on_pause_and_ignores_strangers(make: Make) -> None:
    driver = make(slots=1)
    driver.submit(ask("a"), ask("waiting"), ask("paused"))
    driver.pause("paused")
    for seq in ("waiting", "paused", "stranger"):
        driver.engine.abort(seq)
    record = driver.drain()
    ends = {seq: record.finish(seq) for seq in record.ends}
    assert ends == {"a": "length", "waiting": "cancelled", "paused": "cancelled"}


def test_an_id_that_ended_may_come_again(make: Make) -> None:
    """As after a hand-back: what the first life left behind must not reach the second."""
    driver = make()
    driver.submit(ask("a", sampling=LONG))
    driver.until_tokens("a", 2)
    driver.engine.abort("a")
    driver.step()
    again = Driver(driver.engine)
    assert again.run(ask("a")).tokens["a"] == make().run(ask("a")).tokens["a"]


def test_lower_priority_numbers_go_first_then_who_came_first(make: Make) -> None:
    record = make(slots=1).run(
        ask("late", priority=2), ask("first", priority=1), ask("second", priority=1), ask("urgent", priority=0)
    )
    assert record.order == ["urgent", "first", "second", "late"]


def test_a_sequence_past_its_deadline_expires_wherever_it_is(make: Make) -> None:
    now = 100.0
    driver = make(slots=1, clock=lambda: now)
    driver.submit(*(ask(seq, sampling=LONG, deadline=110.0) for seq in ("running", "waiting", "paused")))
    driver.pause("paused")
    driver.until_tokens("running", 3)
    now = 110.0
    assert not driver.engine.idle
    driver.step()
    assert {driver.record.finish(seq) for seq in ("running", "waiting", "paused")} == {"expired"}
    driver.drain()


def test_all_that_was_submitted_ends_when_it_is_drained(make: Make) -> None:
    requests = [
        ask(str(n), "the sea " * (1 + n * 7 % 23), SamplingParams(max_tokens=3 + n * 5 % 31, temperature=0))
        for n in range(24)
    ]
    alone = {request.seq: make().run(request).tokens[request.seq] for request in requests[::5]}
    driver = make()
    for n, request in enumerate(requests):
        driver.submit(request)
        for _ in range(n % 4):
            driver.step()
        if n % 5 == 4:
            driver.pause(str(n - 1))
            driver.resume(str(n - 1))
    record = driver.drain()
    assert {record.finish(request.seq) for request in requests} <= {"length", "stop"}
    assert {seq: record.tokens[seq] for seq in alone} == alone
    assert driver.engine.stats().running == driver.engine.stats().waiting == 0


def test_stats_count_what_happened(make: Make) -> None:
    driver = make(slots=2)
    before = driver.engine.stats()
    driver.submit(*(ask(seq, sampling=LONG) for seq in ("a", "b", "c")))
    driver.until_tokens("a", 40)
    stats = driver.engine.stats()
    assert (stats.slots, stats.running, stats.waiting, stats.paused) == (2, 2, 1, 0)
    assert 0 < stats.kv_tokens_used < stats.kv_tokens_total
    driver.clear()
    stats = driver.engine.stats()
    assert (stats.running, stats.kv_tokens_used) == (0, 0)
    assert stats.generated_tokens == sum(map(len, driver.record.tokens.values()))
    assert stats.prefilled_tokens - before.prefilled_tokens >= 2 * len(prompt("the sea"))
    assert stats.steps - before.steps >= 40


def test_health_is_the_age_of_the_last_token(make: Make) -> None:
    now = 50.0
    driver = make(clock=lambda: now)
    assert driver.engine.stats().last_token_age_s is None
    driver.run(ask("a"))
    now = 53.0
    assert driver.engine.stats().last_token_age_s == 3.0
    assert driver.engine.stats().step_age_s == 0.0


BAD = {
    "bad_token": Request("bad", (1, 999_999), sampling=GREEDY),
    "negative_token": Request("bad", (-1,), sampling=GREEDY),
    "bad_output": Request("bad", (1,), output=(999_999,), sampling=GREEDY),
    "empty_prompt": Request("bad", (), sampling=GREEDY),
    "context_exceeded": Request("bad", (65,) * 9000, sampling=GREEDY),
}


@pytest.mark.parametrize("poison", sorted(BAD))
def test_a_bad_request_fails_alone(make: Make, poison: str) -> None:
    expected = make().run(ask("good")).tokens["good"]
    driver = make()
    driver.submit(ask("good"))
    driver.until_tokens("good", 2)
    driver.submit(BAD[poison])
    record = driver.drain()
    assert record.tokens["good"] == expected
    assert record.finish("bad") == "error"
    assert record.ends["bad"].error_code in {poison, "bad_token"}
    assert record.tokens["bad"] == []


def test_a_sequence_that_is_no_number_fails_alone_and_leaves_nothing_behind(make: Make, kind: str) -> None:
    if kind == "scripted":
        pytest.skip("it has no numbers")
    expected = make(slots=2).run(ask("good", sampling=LONG_ENOUGH), ask("next", "zz")).tokens
    driver = make(slots=2)
    driver.submit(ask("good", sampling=LONG_ENOUGH))
    driver.until_tokens("good", 2)
    bad = (65, POISON, *(66,) * 80)  # more than a block of any cache
    driver.submit(Request("bad", bad, sampling=GREEDY))
    driver.until(lambda: "bad" in driver.record.ends)
    driver.submit(ask("next", "zz"))  # in the row, or the blocks, that the bad one left
    driver.submit(Request("again", bad, sampling=GREEDY))  # nothing of it was kept to begin from
    record = driver.drain()
    for seq in ("bad", "again"):
        assert (record.ends[seq].error_code, record.tokens[seq]) == ("numeric_error", [])
    assert record.tokens["good"] == expected["good"]
    assert record.tokens["next"] == expected["next"]


def test_a_second_sequence_of_a_live_id_is_refused_and_the_first_goes_on(make: Make) -> None:
    driver = make()
    driver.engine.submit(ask("a"))
    driver.engine.submit(ask("a", "another"))
    (refusal,) = [output for output in driver.engine.step() if output.finish]
    assert refusal.error_code == "duplicate_sequence"
    driver.until(lambda: "a" in driver.record.ends)
    assert driver.record.finish("a") == "length"


def test_a_full_context_ends_with_length(make: Make, kind: str) -> None:
    driver = make()
    context = driver.engine.capabilities.max_context
    record = driver.run(ask("a", "x" * (context - 4), SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)))
    assert len(record.tokens["a"]) == 4
    assert record.finish("a") == "length"


def test_what_was_already_over_ends_without_a_token(make: Make) -> None:
    record = make().run(ask("a", output=(65,) * 12))
    assert record.tokens["a"] == []
    assert record.finish("a") == "length"


def test_a_long_prompt_does_not_stall_who_is_decoding(make: Make) -> None:
    driver = make()
    driver.submit(ask("a", sampling=LONG))
    driver.until_tokens("a", 2)
    driver.submit(ask("long", "x" * 1500))
    before = len(driver.record.tokens["a"])
    driver.until_tokens("long", 1)
    assert len(driver.record.tokens["a"]) >= before + 2  # its prompt took more than one step


def test_a_stop_string_ends_the_text_and_the_sequence(make: Make) -> None:
    whole = make().run(ask("a", sampling=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))).tokens["a"]
    text = byte_tokenizer().decode(whole)
    stop = next(text[at : at + 3] for at in range(8, 40) if "\N{REPLACEMENT CHARACTER}" not in text[at : at + 3])
    request = ask("a", sampling=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, stop=(stop,)))
    driver, stage = make(), TextStage(byte_tokenizer())
    stage.open(request)
    driver.engine.submit(request)
    pieces: list[str] = []
    finishes: list[str | None] = []
    deadline = time.monotonic() + 60
    while not (finishes and driver.engine.idle and not driver.engine.stats().running):
        assert time.monotonic() < deadline
        released, stopped = stage.feed(driver.engine.step())
        for seq in stopped:
            driver.engine.abort(seq)
        pieces += [piece for output in released for piece in output.pieces]
        finishes += [output.finish for output in released if output.finish]
    assert "".join(pieces) == text[: text.index(stop)]
    assert finishes == ["stop"]


def test_seed_and_choice_make_different_texts(make: Make) -> None:
    other_seed = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=8, ignore_eos=True)
    record = make().run(
        ask("a", sampling=SAMPLED),
        ask("again", sampling=SAMPLED),
        ask("choice", sampling=SAMPLED, choice=1),
        ask("seed", sampling=other_seed),
    )
    assert record.tokens["a"] == record.tokens["again"]
    assert record.tokens["a"] != record.tokens["choice"]
    assert record.tokens["a"] != record.tokens["seed"]


def test_one_tenants_beginnings_are_reused_and_not_by_another(make: Make) -> None:
    driver = make()
    if not driver.engine.capabilities.prefix_cache:
        pytest.skip("this engine keeps no beginnings")
    start = driver.engine.stats().reused_tokens

    def reused() -> int:
        return driver.engine.stats().reused_tokens - start

    text = f"a shared beginning {time.monotonic_ns()} " * 20  # vLLM keeps what earlier tests began with
    driver.run(ask("first", text, tenant="ann"))
    assert reused() == 0
    driver.run(ask("other", text, tenant="bob"))
    assert reused() == 0
    driver.run(ask("again", text, tenant="ann"))
    assert reused() >= len(text) // 2


def test_what_begins_is_told_before_it_is_worked_on(make: Make) -> None:
    driver = make(slots=1)
    begun: list[str] = []
    driver.engine.on_begin = begun.extend
    driver.submit(ask("a", sampling=LONG), ask("b"))
    driver.until_tokens("a", 1)
    assert begun == ["a"]
    driver.engine.abort("a")
    driver.drain()
    assert begun == ["a", "b"]


UNBOUND = {
    "weight": Request("bad", prompt("a"), sampling=GREEDY, weight=0.0),
    "weight that is no number": Request("bad", prompt("a"), sampling=GREEDY, weight=float("nan")),
    "logprobs": Request("bad", prompt("a"), sampling=msgspec.structs.replace(GREEDY, logprobs=-1)),
}


@pytest.mark.parametrize("what", UNBOUND)
def test_what_would_end_the_engine_for_everybody_is_refused(make: Make, what: str) -> None:
    record = make().run(UNBOUND[what], ask("good"))
    assert record.ends["bad"].error_code == "bad_parameter"
    assert record.finish("good") == "length"
