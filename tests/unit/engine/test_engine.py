"""The batching loop where it promises more than every engine does (tests/engines): budget, chunks, counts."""

from __future__ import annotations

import pytest

from tests.unit.engine.conftest import EngineFactory
from tests.unit.engine.driving import Record, ask, drain, prompt, run, step_until
from workers.engine.prefix import BLOCK
from workers.engine.protocol import SamplingParams


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


def test_a_full_context_ends_with_length(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_tokens=64)
    record = run(engine, ask("a", "x" * 60, SamplingParams(max_tokens=500, ignore_eos=True)))
    assert len(record.tokens["a"]) == 4
    assert record.finish("a") == "length"
    assert engine.capabilities.max_context == 64


def test_a_long_prompt_does_not_stall_who_is_decoding(make_engine: EngineFactory) -> None:
    engine, record = make_engine(), Record()
    engine.submit(ask("a", sampling=SamplingParams(max_tokens=40, ignore_eos=True)))
    step_until(engine, record, "a", 2)
    engine.submit(ask("long", "x" * 480))
    before = len(record.tokens["a"])
    steps = step_until(engine, record, "long", 1)
    assert steps >= -(-480 // engine._model.prefill_chunk) > 1
    assert len(record.tokens["a"]) == before + steps


def test_more_than_fits_waits_for_room(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_tokens=130)
    for seq in ("a", "b", "c"):
        engine.submit(
            ask(seq, sampling=SamplingParams(max_tokens=40, ignore_eos=True))
        )  # 47 tokens each, or 64 of room
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    record = drain(engine, Record())
    assert {record.finish(seq) for seq in ("a", "b", "c")} == {"length"}


@pytest.mark.parametrize(("away_s", "kept"), [(5.0, True), (15.0, False)])
def test_a_paused_sequence_is_not_computed_again_unless_its_reader_stays_away(
    make_engine: EngineFactory, away_s: float, kept: bool
) -> None:
    now = 1000.0
    engine, record = make_engine(prefix_tokens=4 * BLOCK, pause_grace_s=10.0, clock=lambda: now), Record()
    engine.submit(ask("a", "p" * (2 * BLOCK)))
    step_until(engine, record, "a", 3)
    engine.pause("a")
    now += away_s
    for number in range(3):
        run(engine, ask(f"other {number}", str(number) * (4 * BLOCK)))
    before = engine.stats().reused_tokens
    engine.resume("a")
    drain(engine, record)
    assert (engine.stats().reused_tokens - before == 2 * BLOCK) is kept
    assert record.tokens["a"] == run(make_engine(), ask("a", "p" * (2 * BLOCK))).tokens["a"]
