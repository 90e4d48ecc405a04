"""Draws follow the distribution that was asked for, and depend on seed, choice and position alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.engine.protocol import Request, SamplingParams
from workers.engine.sampling import sample, uniform
from workers.engine.sequence import Sequence

VOCABULARY = 300  # more than one block of the inverse CDF


def row(sampling: SamplingParams, *, position: int = 0, choice: int = 0, prompt: tuple[int, ...] = (1,)) -> Sequence:
    request = Request("s", prompt, sampling=sampling, choice=choice)
    return Sequence(request, arrival=0, need=0, output=[2] * position)


def logits_for_tests(rows: int = 1, spread: float = 2.0, vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((rows, vocabulary), generator=generator) * spread


def warped(logits: Any, p: SamplingParams) -> Tensor:
    """The probabilities that transformers would draw from."""
    no_ids: Any = torch.zeros((1, 1), dtype=torch.int64)
    logits = TemperatureLogitsWarper(p.temperature)(no_ids, logits)
    if p.top_k:
        logits = TopKLogitsWarper(p.top_k)(no_ids, logits)
    if p.top_p < 1:
        logits = TopPLogitsWarper(p.top_p)(no_ids, logits)
    if p.min_p:
        logits = MinPLogitsWarper(p.min_p)(no_ids, logits)
    probabilities: Tensor = logits.softmax(-1)[0]
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 9},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.2},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers_warpers(params: dict[str, float]) -> None:
    logits = logits_for_tests()
    count = 4000
    rows = [row(SamplingParams(seed=seed, **params)) for seed in range(count)]  # type: ignore[arg-type]
    drawn = torch.tensor(sample(logits.repeat(count, 1), rows))
    expected = warped(logits, rows[0].request.sampling)
    seen = torch.bincount(drawn, minlength=VOCABULARY) / count
    assert not seen[expected == 0].any()
    assert (seen - expected).abs().max() < 0.03
    assert (seen - expected).abs().sum() / 2 < 0.12  # total variation; 4000 draws of 300 tokens come to about 0.08


def test_a_nucleus_wider_than_the_candidates_is_found() -> None:
    flat = logits_for_tests(spread=0.1, vocabulary=5000)
    params = SamplingParams(top_p=0.9, temperature=1.0)
    allowed = warped(flat, params) > 0
    assert allowed.sum() > 4000
    rows = [row(SamplingParams(top_p=0.9, seed=seed)) for seed in range(500)]
    drawn = torch.tensor(sample(flat.repeat(500, 1), rows))
    assert allowed[drawn].all()
    assert len(set(drawn.tolist())) > 400


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = logits_for_tests(rows=12)
    kinds = [SamplingParams(seed=n, top_p=0.9) for n in range(4)]
    kinds += [SamplingParams(seed=n, top_k=7, temperature=0.8) for n in range(4)]
    kinds += [SamplingParams(temperature=0), *(SamplingParams(seed=n, repetition_penalty=1.3) for n in range(3))]
    rows = [row(params, position=n) for n, params in enumerate(kinds)]
    together = sample(logits.clone(), rows)
    assert together == [sample(logits[n : n + 1].clone(), [rows[n]])[0] for n in range(12)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_seed_choice_and_position_each_change_the_draw() -> None:
    numbers = {uniform(seed, choice, position) for seed in range(10) for choice in range(10) for position in range(10)}
    assert len(numbers) == 1000
    assert 0.45 < sum(numbers) / 1000 < 0.55
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(-1, 0, 0) != uniform(2**70, 0, 0)  # any integer is a seed


def test_temperature_zero_takes_the_best_token() -> None:
    logits = logits_for_tests(rows=3)
    assert sample(logits.clone(), [row(SamplingParams(temperature=0))] * 3) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_is_nearly_greedy_and_stays_finite() -> None:
    logits = logits_for_tests(spread=50)
    assert sample(logits.clone(), [row(SamplingParams(temperature=1e-30))]) == logits.argmax(-1).tolist()


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_for_tests(spread=1)
    best = logits.argsort(descending=True)[0, :5].tolist()
    sequence = row(SamplingParams(temperature=0, repetition_penalty=1.5), prompt=(best[0], best[0]))
    sequence.output.extend(best[1:4])
    ids = torch.tensor([[*sequence.request.prompt, *sequence.output]])
    expected = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits.clone()).argmax().item()
    assert sample(logits.clone(), [sequence]) == [expected]
    assert expected != best[0]


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5, -9.0]])
    greedy = {"temperature": 0.0}
    fresh = row(SamplingParams(**greedy, frequency_penalty=2.0), prompt=(0, 0, 0))  # type: ignore[arg-type]
    assert sample(logits.clone(), [fresh]) == [0]
    used = row(SamplingParams(**greedy, frequency_penalty=0.06))  # type: ignore[arg-type]
    used.output.extend([0])
    assert sample(logits.clone(), [used]) == [0]
    used.output.extend([0])
    assert sample(logits.clone(), [used]) == [1]
    present = row(SamplingParams(**greedy, presence_penalty=0.3))  # type: ignore[arg-type]
    present.output.extend([0])
    assert sample(logits.clone(), [present]) == [1]
    present.output.extend([0, 0, 1])  # presence does not grow with the count
    assert sample(logits.clone(), [present]) == [0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.1}], ids=str)
def test_a_row_that_is_no_number_has_no_token_and_spoils_no_other(poison: float, params: dict[str, float]) -> None:
    logits = logits_for_tests(rows=3)
    rows = [row(SamplingParams(seed=n, **params)) for n in range(3)]  # type: ignore[arg-type]
    healthy = sample(logits.clone(), rows)
    logits[1, 3] = poison
    assert sample(logits, rows) == [healthy[0], None, healthy[2]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-46, 5e-324])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    logits = logits_for_tests()
    best = int(logits.argmax())
    assert sample(logits, [row(SamplingParams(temperature=temperature, seed=3))]) == [best]
