"""What every engine makes of the sampling that was asked for: biases, stop ids, logprobs, schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import msgspec
import pytest

from tests.engines.driving import Driver
from tests.random_llama import EOS
from tests.unit.engine.driving import GREEDY, ask
from workers.engine.protocol import SamplingParams

Make = Callable[..., Driver]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 999}, "name": {"enum": ["ann", "bob"]}},
        "required": ["count", "name"],
        "additionalProperties": False,
    }
)
GUIDED = SamplingParams(max_tokens=300, temperature=1.0, seed=5, json_schema=SCHEMA)


def sampling(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


def require_schemas(driver: Driver) -> None:
    if not driver.engine.capabilities.json_schema:
        pytest.skip("this engine holds no text to a schema")


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_stop_token_ends_the_text_and_is_not_part_of_it(make: Make, at: int) -> None:
    whole = make().run(ask("a")).tokens["a"]
    first = whole.index(whole[at])
    record = make().run(ask("a", sampling=sampling(stop_token_ids=(whole[at],))))
    assert record.tokens["a"] == whole[:first]
    assert record.finish("a") == "stop"


def test_a_bias_of_100_makes_a_token_and_one_of_minus_100_forbids_it(make: Make, kind: str) -> None:
    if kind == "scripted":
        pytest.skip("it has no logits")
    whole = make().run(ask("a")).tokens["a"]
    other = next(token for token in range(256) if token not in whole)
    always = make().run(ask("a", sampling=sampling(logit_bias={other: 100.0})))
    assert always.tokens["a"] == [other] * 12
    never = make().run(ask("a", sampling=sampling(logit_bias={whole[0]: -100.0})))
    assert whole[0] not in never.tokens["a"]


def test_a_bias_for_every_token_changes_nothing(make: Make) -> None:
    everything = dict.fromkeys(range(259), -100.0)
    for asked in (sampling(), sampling(temperature=1.0, seed=3)):
        plain, biased = asked, msgspec.structs.replace(asked, logit_bias=everything)
        record = make().run(ask("plain", sampling=plain), ask("biased", sampling=biased))
        assert record.tokens["biased"] == record.tokens["plain"]


def test_logprobs_come_with_each_token_of_those_who_ask(make: Make) -> None:
    record = make().run(
        ask("none"), ask("own", sampling=sampling(logprobs=0)), ask("top", sampling=sampling(logprobs=3))
    )
    assert record.tokens["own"] == record.tokens["top"] == record.tokens["none"]
    assert record.logprobs["none"] == []
    for seq, top in (("own", 0), ("top", 3)):
        assert len(record.logprobs[seq]) == 12
        for token, scored in zip(record.tokens[seq], record.logprobs[seq], strict=True):
            assert scored.logprob <= 0
            assert len(scored.top) <= top
            if top:  # greedily the token is the best one
                assert scored.top[0] == (token, scored.logprob)
                assert [score for _, score in scored.top] == sorted((score for _, score in scored.top), reverse=True)
                assert sum(math.exp(score) for _, score in scored.top) <= 1.001


def test_logprobs_are_the_models_own_whatever_sampling_does_to_them(make: Make, kind: str) -> None:
    if kind == "scripted":
        pytest.skip("it is always certain")
    plain = make().run(ask("a", sampling=sampling(logprobs=2)))
    token = plain.tokens["a"][0]
    biased = make().run(ask("a", sampling=sampling(logprobs=2, logit_bias={token: -100.0}, repetition_penalty=1.5)))
    assert biased.tokens["a"][0] != token
    assert dict(biased.logprobs["a"][0].top) == pytest.approx(dict(plain.logprobs["a"][0].top))


@pytest.mark.parametrize("field", [{"logit_bias": {999_999: 1.0}}, {"stop_token_ids": (-1,)}])
def test_a_token_that_does_not_exist_is_refused_wherever_it_is_named(make: Make, field: dict[str, object]) -> None:
    record = make().run(ask("bad", sampling=sampling(**field)), ask("good"))
    assert record.ends["bad"].error_code == "bad_token"
    assert record.finish("good") == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_a_text_is_held_to_its_schema_and_ends_when_it_is_met(make: Make, temperature: float) -> None:
    driver = make()
    require_schemas(driver)
    asked = msgspec.structs.replace(GUIDED, temperature=temperature)
    driver.submit(ask("free"), *(ask(f"g{n}", sampling=asked, choice=n) for n in range(3)))
    record = driver.drain()
    for n in range(3):
        assert record.finish(f"g{n}") == "stop"
        said = json.loads(bytes(record.tokens[f"g{n}"]))
        assert set(said) == {"count", "name"}
        assert 0 <= said["count"] <= 999
    assert record.tokens["free"] == make().run(ask("free")).tokens["free"]


def test_a_guide_is_built_again_from_the_tokens(make: Make) -> None:
    driver = make()
    require_schemas(driver)
    whole = driver.run(ask("a", sampling=GUIDED)).tokens["a"]
    for at in range(len(whole) + 1):
        record = make().run(ask("a", sampling=GUIDED, output=tuple(whole[:at])))
        assert (record.tokens["a"], record.finish("a")) == (whole[at:], "stop")


def test_a_guided_sequence_that_is_paused_goes_on_unchanged(make: Make) -> None:
    driver = make()
    require_schemas(driver)
    whole = driver.run(ask("a", sampling=GUIDED)).tokens["a"]
    driver = make()
    driver.submit(ask("a", sampling=GUIDED))
    driver.pause("a")  # while its guide is made
    driver.run(ask("b"))
    assert driver.record.tokens.get("a", []) == []
    driver.resume("a")
    driver.until_tokens("a", 3)
    driver.pause("a")
    driver.run(ask("c"))
    driver.resume("a")
    assert driver.drain().tokens["a"] == whole


def test_the_end_comes_only_where_the_schema_allows_it(make: Make) -> None:
    driver = make()
    require_schemas(driver)
    eager = msgspec.structs.replace(GUIDED, logit_bias={EOS: 100.0})
    record = driver.run(
        ask("a", sampling=eager),
        ask("number", sampling=msgspec.structs.replace(eager, json_schema='{"type":"integer"}', ignore_eos=True)),
    )
    json.loads(bytes(record.tokens["a"]))
    assert len(record.tokens["number"]) <= 2  # a digit is a whole number, with a sign before it perhaps
    assert (record.finish("a"), record.finish("number")) == ("stop", "stop")


def test_max_tokens_cuts_a_guided_text(make: Make) -> None:
    driver = make()
    require_schemas(driver)
    record = driver.run(ask("a", sampling=msgspec.structs.replace(GUIDED, max_tokens=4)))
    assert (len(record.tokens["a"]), record.finish("a")) == (4, "length")


def test_who_waits_for_a_guide_can_be_aborted_and_expires(make: Make) -> None:
    driver = make(clock=lambda: 100.0)
    require_schemas(driver)
    driver.submit(ask("aborted", sampling=GUIDED), ask("late", sampling=GUIDED, deadline=99.0))
    driver.engine.abort("aborted")
    record = driver.drain()
    assert (record.finish("aborted"), record.finish("late")) == ("cancelled", "expired")


SCHEMAS_THAT_FAIL = {
    "unsatisfiable": ('{"type":"integer","minimum":5,"maximum":3}', "invalid_schema"),
    "no JSON": ("{", "invalid_schema"),
    "leads nowhere": ('{"$ref":"#"}', "invalid_schema"),
    "not supported": ('{"type":"array","uniqueItems":true}', "invalid_schema"),
    "explodes": (
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"{x}{n}": {}}} for x in "ab"], "type": "object"} for n in range(14)]}
        ),
        "invalid_schema",
    ),
    "costly to follow": (json.dumps({"type": "string", "pattern": "^(.*[ -~].{100}){40}$"}), "schema_too_complex"),
}


@pytest.mark.parametrize("which", SCHEMAS_THAT_FAIL)
def test_a_schema_that_cannot_be_followed_fails_alone(make: Make, which: str) -> None:
    driver = make()
    require_schemas(driver)
    schema, code = SCHEMAS_THAT_FAIL[which]
    asked = msgspec.structs.replace(GUIDED, json_schema=schema, max_tokens=1000)
    driver.submit(ask("good", sampling=sampling(max_tokens=40)))
    driver.until_tokens("good", 2)
    driver.submit(ask("bad", sampling=asked), ask("guided", sampling=GUIDED))
    record = driver.drain()
    assert (record.finish("bad"), record.ends["bad"].error_code) == ("error", code)
    assert record.tokens["good"] == make().run(ask("good", sampling=sampling(max_tokens=40))).tokens["good"]
    json.loads(bytes(record.tokens["guided"]))


def test_what_does_not_follow_its_schema_is_not_gone_on_with(make: Make) -> None:
    driver = make()
    require_schemas(driver)
    record = driver.run(ask("a", sampling=GUIDED, output=tuple(b"once upon")))
    assert record.ends["a"].error_code == "invalid_schema"


def test_an_engine_without_guides_refuses_a_schema(make: Make) -> None:
    driver = make()
    if driver.engine.capabilities.json_schema:
        pytest.skip("this engine has them")
    record = driver.run(ask("a", sampling=GUIDED), ask("good"))
    assert record.ends["a"].error_code == "unsupported_by_engine"
    assert record.finish("good") == "length"
