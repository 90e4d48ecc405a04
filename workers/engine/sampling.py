"""Draws one token for every row of a batch.

Each draw takes one number from a counter-based generator keyed by (seed, choice, position): there is no state to
keep, so a sequence that is resumed elsewhere draws what it would have drawn, and no batch-mate can change it.

The number picks a token by the inverse of the cumulative distribution *in vocabulary order*. In order of probability
two tokens that are nearly equally likely would swap places under the last bit's rounding, and everything behind them
would shift; in vocabulary order such rounding moves each border by as little as itself. It is also cheaper: top-k,
top-p and min-p become one floor under the weights, for which a partial sort is enough.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from workers.engine.protocol import SamplingParams
from workers.engine.sequence import Sequence

_MASK = (1 << 64) - 1
_CANDIDATES = 256  # best tokens looked at for top-p; eight times as many, again and again, when they are too few
_COLDEST = torch.finfo(torch.float32).tiny  # a lower temperature would round to 0, and 0 / 0 draws anything
_BLOCK = 256  # tokens summed up first to find a draw's neighbourhood: ten times as fast as one long running sum


def sample(logits: Tensor, rows: Rows[Sequence]) -> list[int | None]:
    """A token for each row of `logits` [rows, vocabulary] (changed in place); None where they are not numbers."""
    if not rows:
        return []
    logits = _penalised(logits.float(), rows)
    peaks = logits.amax(dim=-1, keepdim=True)
    drawn = [row.request.sampling.temperature > 0 for row in rows]
    if all(drawn):
        tokens = _draw(logits - peaks, rows)
    else:
        tokens = logits.argmax(dim=-1)
        if any(drawn):
            drawing = [row for row, draws in zip(rows, drawn, strict=True) if draws]
            tokens[drawn] = _draw((logits - peaks)[drawn], drawing)
    healthy = peaks.isfinite().squeeze(-1).tolist()
    return [token if fine else None for token, fine in zip(tokens.tolist(), healthy, strict=True)]


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw of a position: a number in [0, 1), by rounds of splitmix64 over the key."""
    state = 0
    for word in (seed, choice, position):
        state = _mix((state ^ word) & _MASK)
    return (state >> 16) / (1 << 48)


def _mix(value: int) -> int:
    # The finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _draw(logits: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Tokens [rows]; `logits` have their row's peak at 0, so the best token's weight is 1."""
    params = [row.request.sampling for row in rows]
    weights = (logits / _column([max(p.temperature, _COLDEST) for p in params], logits)).exp_()
    if any(p.min_p > 0 or _cuts(p) for p in params):
        weights.masked_fill_(weights < _floor(weights, params), 0.0)
    numbers = [uniform(row.request.sampling.seed, row.request.choice, len(row.output)) for row in rows]
    return _inverse_cdf(weights, numbers)


def _inverse_cdf(weights: Tensor, numbers: list[float]) -> Tensor:
    """For each row the first token at which the running sum of weights exceeds the number's share of the whole."""
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = _column(numbers, ends) * ends[:, -1:]
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[-1] - 1)  # a row of NaN exceeds it
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.take_along_dim(block.unsqueeze(-1), dim=1).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    # The two sums may differ in the last bit; a draw must not fall behind the block's last token with a weight.
    last = torch.nextafter(inside[:, -1:], torch.zeros_like(targets))
    within = torch.searchsorted(inside, torch.minimum(targets - before, last), right=True)
    return (block * _BLOCK + within).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _floor(weights: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """The least weight [rows, 1] that may be drawn. Filters apply in transformers' order: top-k, top-p, min-p."""
    floor = _column([min(p.min_p, 1.0) for p in params], weights)
    cut = [_cuts(p) for p in params]
    if any(cut):
        cutting = [p for p in params if _cuts(p)]
        floor[cut] = torch.maximum(floor[cut], _nucleus(weights if all(cut) else weights[cut], cutting, _CANDIDATES))
    return floor


def _nucleus(weights: Tensor, params: Rows[SamplingParams], candidates: int) -> Tensor:
    """The weight [rows, 1] of the last token in the smallest best set that top-k and then top-p leave."""
    vocabulary = weights.shape[-1]
    limits = [min(p.top_k, vocabulary) if p.top_k > 0 else vocabulary for p in params]
    width = min(vocabulary, max(candidates, *(p.top_k for p in params), 1))
    best = weights.topk(width, dim=-1).values
    rank = torch.arange(width, device=weights.device)
    limit = torch.tensor(limits, device=weights.device).unsqueeze(-1)
    best = torch.where(rank < limit, best, 0.0)
    total = torch.where(limit < vocabulary, best.sum(-1, keepdim=True), weights.sum(-1, keepdim=True))
    ahead = best.cumsum(-1) - best
    kept = ((ahead < _column([p.top_p for p in params], weights) * total) & (rank < limit)).sum(-1, keepdim=True)
    if width < vocabulary and bool(((kept == width) & (limit > width)).any()):
        return _nucleus(weights, params, candidates * 8)
    return best.gather(-1, kept.clamp_(min=1) - 1)


def _penalised(logits: Tensor, rows: Rows[Sequence]) -> Tensor:
    for index, row in enumerate(rows):
        params = row.request.sampling
        if params.repetition_penalty != 1:
            _penalise_repetition(logits[index], [*row.request.prompt, *row.output], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            _penalise_use(logits[index], row.output, params)
    return logits


def _penalise_repetition(logits: Tensor, tokens: list[int], penalty: float) -> None:
    # CTRL's rule, as transformers has it: a positive logit shrinks, a negative one grows in size.
    seen = torch.tensor(tokens, device=logits.device)
    score = logits[seen]
    logits[seen] = torch.where(score < 0, score * penalty, score / penalty)


def _penalise_use(logits: Tensor, output: list[int], params: SamplingParams) -> None:
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64, device=logits.device), minlength=len(logits))
    logits -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
