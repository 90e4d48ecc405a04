"""Penalties of a sequence that goes on in vLLM.

Presence and frequency count what was generated (OpenAI's definition). What was generated before a takeover, a pause or
a crash is a part of the prompt to vLLM, which does not count it. This logits processor, in vLLM's worker process,
counts both; it does the repetition penalty too, since that one comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate


class _Row(NamedTuple):
    prompt: list[int]
    earlier: int  # tokens at its end that were generated before
    output: list[int]  # vLLM's own list, which grows
    repetition: float
    presence: float
    frequency: float

    def counts(self, device: torch.device, vocab: int, *, with_prompt: bool) -> torch.Tensor:
        tokens = self.prompt if with_prompt else self.prompt[len(self.prompt) - self.earlier :]
        drawn = [token for token in (*tokens, *self.output) if token >= 0]  # -1: not drawn yet
        return torch.bincount(torch.tensor(drawn, device=device), minlength=vocab)


class ContinuedPenalties(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._put(index, _row(params, prompt, output))
        for source, target, direction in batch_update.moved:
            there, here = self._rows.pop(target, None), self._rows.pop(source, None)
            self._put(target, here)
            if direction is MoveDirectionality.SWAP:
                self._put(source, there)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [sequences, vocabulary], changed in place."""
        for index, row in self._rows.items():
            _penalise(logits[index], row)
        return logits

    def _put(self, index: int, row: _Row | None) -> None:
        self._rows.pop(index, None)
        if row is not None:
            self._rows[index] = row


def _penalise(logits: torch.Tensor, row: _Row) -> None:
    """`logits` [vocabulary], in the order that vLLM and our own sampling keep."""
    vocab = logits.shape[-1]
    if row.repetition != 1.0:
        seen = row.counts(logits.device, vocab, with_prompt=True) > 0
        scaled = torch.where(logits > 0, logits / row.repetition, logits * row.repetition)
        logits.copy_(torch.where(seen, scaled, logits))
    counts = row.counts(logits.device, vocab, with_prompt=False)
    logits -= row.frequency * counts + row.presence * (counts > 0)


def _row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
    ours = (params.extra_args or {}).get("lingbot")
    if not ours or not prompt:
        return None
    repetition, presence, frequency = ours["penalties"]
    return _Row(prompt, ours["earlier"], output, repetition, presence, frequency)
