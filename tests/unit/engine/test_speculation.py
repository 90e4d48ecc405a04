"""Guesses change how many steps a text takes, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.conftest import OPTIONS
from tests.unit.engine.driving import Record, drain, prompt, run
from tests.unit.engine.test_exact import needs_onednn
from tests.unit.engine.test_scheduler import Rows
from workers.engine.build import build_model, read_card
from workers.engine.loop import BatchEngine, Drawn
from workers.engine.protocol import Request, SamplingParams
from workers.engine.scheduler import Chunk, Plan
from workers.engine.sequence import Sequence
from workers.engine.speculation import MOST, Costs, Lookup, Speculation, best_width
from workers.engine.transformers_engine import TransformersModel

FREE = Costs.through((1, 1.0), (2, 1.0))  # so that whatever can be guessed is
REPEATING = "one two three, one two three, one two "
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_a_guess_is_what_followed_the_last_time() -> None:
    assert Lookup([1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3]).look(4) == (6, 7, 8, 1)
    assert Lookup([1, 2, 3, 4, 1, 2]).look(4) == ()
    assert Lookup([1, 2]).look(4) == ()


def test_a_guess_goes_round_where_the_text_does() -> None:
    assert Lookup([7, 1, 2, 1, 2, 1]).look(5) == (2, 1, 2, 1, 2)
    assert Lookup([5, 5, 5, 5]).look(3) == (5, 5, 5)


@given(st.lists(st.integers(0, 2), min_size=4, max_size=60), st.integers(1, 5))
def test_a_guess_does_not_depend_on_when_it_was_looked_for(tokens: list[int], known: int) -> None:
    lookup = Lookup(tokens[:known])
    for token in tokens[known:]:
        lookup.look(MOST)
        lookup.follow([*lookup.tokens, token], 0)
    assert lookup.look(MOST) == Lookup(tokens).look(MOST)


@pytest.mark.parametrize(("next_tokens", "better"), [([2, 1, 2, 1], True), ([9, 9, 9, 9], False)])
def test_the_chance_follows_what_came_of_the_guesses(next_tokens: list[int], better: bool) -> None:
    lookup = Lookup([1, 2, 1, 2, 1])
    before = lookup.chance
    assert lookup.look(MOST)
    lookup.follow([*lookup.tokens, *next_tokens], 0)
    assert (lookup.chance > before) is better


def test_guessing_pays_for_few_rows_and_good_guesses_only() -> None:
    costs = Costs.through((1, 11.0), (2, 12.0))
    widths = [best_width(costs, [0.9] * rows, [MOST] * rows) for rows in (1, 4, 16, 64)]
    assert widths[0] > 1
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 0
    assert best_width(costs, [0.05], [MOST]) == 0
    assert best_width(costs, [0.9, 0.9], [0, 0]) == 0
    assert best_width(FREE, [1.0, 0.0], [3, MOST]) == 3
    assert best_width(costs, [], []) == 0
    assert best_width(Costs.through((1, 1.0), (9, 9.0)), [], []) == 0  # a step without rows costs nothing


def test_costs_are_lines_through_what_was_measured() -> None:
    costs = Costs.through((1, 10.0), (9, 12.0), (129, 132.0))
    assert [costs.of(tokens) for tokens in (1, 5, 9, 19, 129, 149)] == [10.0, 11.0, 12.0, 22.0, 132.0, 152.0]


def test_what_fits_beside_others_is_read_off_the_same_lines() -> None:
    costs = Costs.through((1, 10.0), (9, 12.0), (129, 132.0))
    assert costs.beside(5, 0.0) == pytest.approx(0)
    assert costs.of(5 + costs.beside(5, 0.7)) == pytest.approx(1.7 * costs.of(5))
    assert costs.of(100 + costs.beside(100, 0.7)) == pytest.approx(1.7 * costs.of(100))
    assert Costs.through((1, 1.0), (2, 1.0)).beside(1, 0.7) == math.inf


def test_more_tokens_never_cost_less_on_a_noisy_machine() -> None:
    costs = Costs.through((1, 5.0), (9, 4.0), (128, 6.0))
    assert [costs.of(tokens) for tokens in (1, 5, 9, 128)] == [5.0, 5.0, 5.0, 6.0]


def test_many_rows_are_guessed_ahead_of_as_long_as_their_tokens_cost_next_to_nothing() -> None:
    costs = Costs.through((1, 50.0), (9, 51.0), (128, 200.0))
    assert best_width(costs, [0.9] * 2, [MOST] * 2) == MOST
    assert 0 < best_width(costs, [0.9] * 16, [MOST] * 16) < MOST
    assert best_width(costs, [0.3] * 16, [MOST] * 16) == 0


@pytest.mark.parametrize(
    ("max_tokens", "context", "longest"), [(100, 512, MOST), (4, 512, 3), (100, 9, 2), (1, 512, 0)]
)
def test_no_guess_goes_beyond_the_end(max_tokens: int, context: int, longest: int) -> None:
    request = Request("a", (1, 2, 1, 2, 1, 2), sampling=SamplingParams(max_tokens=max_tokens))
    [draft] = Speculation(FREE, context).drafts([Sequence(request, arrival=0, need=0)])
    assert len(draft) == longest


# --- the loop, on a model without tensors -----------------------------------------------------------------------------


class Chant:
    """Says what follows of its last two tokens, mostly, and sees that its rows hold what they are thought to hold."""

    name, max_context, vocab_size, exact, prefill_chunk = "chant", 120, 5, True, 16
    guesses, joins = True, False

    def __init__(self, costs: Costs | None) -> None:
        self.costs = costs
        self._rows = Rows()

    def row_length(self, tokens: int) -> int:
        return tokens

    def run(self, plan: Plan) -> list[Drawn]:
        self._rows.run(plan)
        self._rows.check(plan)
        drawn = [each for row in zip(plan.decode, plan.drafts, strict=True) for each in self._verified(*row)]
        return drawn + [Drawn(c.sequence, self._next([*c.sequence.tokens])) for c in plan.prefill if c.completes]

    def _verified(self, sequence: Sequence, draft: tuple[int, ...]) -> Iterator[Drawn]:
        assert sequence.cached == sequence.total - 1
        for n in range(len(draft) + 1):
            token = self._next([*sequence.tokens, *draft[:n]])
            yield Drawn(sequence, token)
            if n < len(draft) and draft[n] != token:
                return

    def _next(self, tokens: list[int]) -> int:
        surprise = len(tokens) % 11 == 0
        return (tokens[-1] * 2 + tokens[-2] + surprise * len(tokens)) % self.vocab_size


TOLD = st.lists(
    st.builds(
        lambda prompt, count, stop, eos: Request(
            "", tuple(prompt), sampling=SamplingParams(max_tokens=count, stop_token_ids=stop, ignore_eos=eos)
        ),
        st.lists(st.integers(0, 4), min_size=2, max_size=40),
        st.integers(1, 90),
        st.sampled_from([(), (3,)]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def _told(requests: list[Request], chance: random.Random, costs: Costs | None) -> tuple[Record, BatchEngine]:
    engine, record, paused = BatchEngine(Chant(costs), slots=3, kv_tokens=360, eos_ids=(4,)), Record(), set()
    for number, request in enumerate(requests):
        engine.submit(msgspec.structs.replace(request, seq=str(number)))
        for _ in range(chance.randrange(4)):
            record.take(engine.step())
        if chance.random() < 0.3:
            engine.pause(str(number))
            paused.add(str(number))
    drain(engine, record)
    for seq in paused:
        engine.resume(seq)
    return drain(engine, record), engine


@settings(deadline=None)
@given(TOLD, st.integers(0, 1000))
def test_texts_and_ends_are_the_same_with_guesses_and_without(requests: list[Request], seed: int) -> None:
    plain, _ = _told(requests, random.Random(seed), None)
    guessed, engine = _told(requests, random.Random(seed), FREE)
    assert guessed.tokens == plain.tokens
    assert {seq: end.finish for seq, end in guessed.ends.items()} == {
        seq: end.finish for seq, end in plain.ends.items()
    }
    assert engine.stats().confirmed_tokens <= engine.stats().guessed_tokens


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    request = Request("a", (1, 2), sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    engine = BatchEngine(Chant(FREE), slots=1, kv_tokens=120)
    record = run(engine, request)
    stats = engine.stats()
    assert len(record.tokens["a"]) == stats.generated_tokens == 100
    assert stats.confirmed_tokens > 30
    assert stats.steps == 100 - stats.confirmed_tokens
    assert stats.kv_tokens_used == 0


# --- real models ------------------------------------------------------------------------------------------------------

SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=60, temperature=0.4, seed=3, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=60, temperature=0.2, seed=4, repetition_penalty=1.02, frequency_penalty=0.02, ignore_eos=True
    ),
    "with logprobs": msgspec.structs.replace(GREEDY, logprobs=2),
}


@pytest.fixture(scope="module", params=["lean", "generic"])
def models(request: pytest.FixtureRequest, tiny_folder: Path) -> Callable[[Costs | None], TransformersModel]:
    card = read_card(tiny_folder)
    if request.param == "generic":
        card = msgspec.structs.replace(card, options={"forward": "generic"})
    model = cast(
        TransformersModel,
        build_model(tiny_folder, card, msgspec.structs.replace(OPTIONS, exact=True, speculation=True)),
    )

    def at(costs: Costs | None) -> TransformersModel:
        model.costs = costs
        return model

    return at


@needs_onednn
@pytest.mark.parametrize("how", SAMPLINGS)
def test_a_model_writes_the_same_with_guesses_and_without(
    models: Callable[[Costs | None], TransformersModel], how: str
) -> None:
    texts = [REPEATING, "x" * 90, "to be or not to be, to be or not", "a"]
    requests = [Request(str(n), prompt(text), sampling=SAMPLINGS[how]) for n, text in enumerate(texts)]
    plain = run(BatchEngine(models(None), slots=4, kv_tokens=2048), *requests)
    engine = BatchEngine(models(FREE), slots=4, kv_tokens=2048, prefix_tokens=256)
    guessed = run(engine, *requests)
    assert guessed.tokens == plain.tokens
    assert engine.stats().guessed_tokens > 0
    for seq, scores in plain.logprobs.items():
        assert [one.logprob for one in guessed.logprobs[seq]] == pytest.approx(
            [one.logprob for one in scores], abs=1e-4
        )


@needs_onednn
def test_who_takes_the_row_of_one_that_ended_writes_the_same(
    models: Callable[[Costs | None], TransformersModel],
) -> None:
    requests = [
        Request(str(n), prompt(letter * 90), sampling=msgspec.structs.replace(GREEDY, max_tokens=2 * n + 9))
        for n, letter in enumerate("abcdefghij")
    ]
    plain = run(BatchEngine(models(None), slots=4, kv_tokens=2048), *requests)
    engine = BatchEngine(models(FREE), slots=4, kv_tokens=2048)
    assert run(engine, *requests).tokens == plain.tokens
    assert engine.stats().confirmed_tokens > 0


@needs_onednn
def test_who_is_taken_over_in_mid_text_writes_the_same(models: Callable[[Costs | None], TransformersModel]) -> None:
    asked = Request("a", prompt(REPEATING), sampling=GREEDY)
    [whole] = run(BatchEngine(models(None), slots=1, kv_tokens=512), asked).tokens.values()
    for at in (1, 17, 42):
        engine = BatchEngine(models(FREE), slots=1, kv_tokens=512)
        rest = run(engine, msgspec.structs.replace(asked, output=tuple(whole[:at]))).tokens["a"]
        assert rest == whole[at:]


def test_a_wrong_guess_that_is_no_number_spoils_nothing(models: Callable[[Costs | None], TransformersModel]) -> None:
    model, sick = models(None), 200

    def said(draft: tuple[int, ...]) -> list[int]:
        sequence = Sequence(Request("a", prompt("the sea")), arrival=0, need=0)
        tokens = len(sequence.request.prompt)
        [first] = model.run(Plan([], [], [Chunk(sequence, tokens)], [], [], rows=1, longest=tokens))
        sequence.cached, sequence.output = tokens, [cast(int, first.token)]
        for n in range(12):
            guess = draft if n == 2 else ()
            longest = sequence.cached + 1 + len(guess)
            drawn = model.run(Plan([sequence], [guess], [], [], [], rows=1, longest=longest))
            assert len(drawn) == 1
            sequence.output.append(cast(int, drawn[0].token))
            sequence.cached += 1
        return sequence.output

    plain = said(())
    assert sick not in plain
    embedding = _embedding(model)
    healthy = embedding[sick].clone()
    embedding[sick] = torch.nan
    try:
        assert said((sick, 1, 2)) == plain
    finally:
        embedding[sick] = healthy


def _embedding(model: TransformersModel) -> torch.Tensor:
    forward = cast(SimpleNamespace, model._forward)
    if hasattr(forward, "_embedding"):
        return cast(torch.Tensor, forward._embedding)
    return cast(torch.Tensor, forward._model.get_input_embeddings().weight.data)


def test_what_a_step_costs_is_measured_and_guessed_where_that_is_wanted(tiny_folder: Path) -> None:
    card = read_card(tiny_folder)
    plain = build_model(tiny_folder, card, OPTIONS)
    guessing = build_model(tiny_folder, card, msgspec.structs.replace(OPTIONS, speculation=True))
    assert (plain.guesses, guessing.guesses) == (False, True)
    assert plain.costs is not None
    assert plain.costs.of(1) > 0
