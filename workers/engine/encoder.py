"""Vectors from an encoder of the Hugging Face kind: forward, pooling, cut, normalisation.

What is done after the forward is what the model's sentence-transformers configuration says; the importer has put it
into the card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel

from workers.engine import dtype
from workers.engine.build import EngineCard
from workers.engine.fault import Fault
from workers.engine.protocol import Tokens
from workers.engine.wire import EngineOptions

_BUDGET = 512  # tokens: 0.1 s of a 22M model on one core, and 1,024 are not faster (measured)
_BUDGET_GPU = 16_384
_NOT_A_NUMBER = Fault("numeric_error", "the model's output is not a number for an input")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's `options` for an encoder."""

    pooling: Literal["mean", "cls"] = "mean"  # of the last hidden states: over the input's tokens, or the first one's
    normalize: bool = True  # to length 1


def load_encoder(folder: Path, card: EngineCard, options: EngineOptions) -> HuggingFaceEncoder:
    """Load and warm up. Only safetensors are read and no code of the model's is run. ValueError when it cannot be."""
    torch.set_num_threads(max(1, options.threads))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    longest = getattr(config, "max_position_embeddings", card.max_context)
    model: Any = AutoModel.from_pretrained(
        folder,
        config=config,
        dtype=dtype.chosen(options),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    how = msgspec.convert(card.options, Options)
    encoder = HuggingFaceEncoder(model.to(options.device).eval(), min(card.max_context, longest), how)
    encoder.run([(0,) * min(8, encoder.max_input)] * 2, [0, 0])  # the first forward pays for lazy initialisation
    return encoder


class HuggingFaceEncoder:
    """Any encoder whose last hidden states are what its vectors are made of."""

    def __init__(self, model: Any, max_input: int, options: Options) -> None:
        self.max_input = max_input
        self.vocab_size: int = model.config.vocab_size
        self.dimensions: int = model.config.hidden_size
        self._model = model
        self._options = options
        self._device: torch.device = model.device
        self._padding: int = model.config.pad_token_id or 0
        self.budget = _BUDGET if self._device.type == "cpu" else _BUDGET_GPU

    @torch.inference_mode()
    def run(self, inputs: list[Tokens], dimensions: list[int]) -> list[bytes | Fault]:
        ids = torch.full((len(inputs), max(map(len, inputs))), self._padding)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        hidden: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors = self._pooled(hidden.float(), mask).cpu()
        return [self._finished(vector, kept) for vector, kept in zip(vectors, dimensions, strict=True)]

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """One vector [rows, dimensions] of the hidden states [rows, tokens, dimensions]."""
        if self._options.pooling == "cls":
            return hidden[:, 0]
        weights = mask[:, :, None].to(hidden.dtype)
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1)

    def _finished(self, vector: Tensor, kept: int) -> bytes | Fault:
        if not torch.isfinite(vector).all():
            return _NOT_A_NUMBER
        if kept:
            vector = vector[:kept]
        if self._options.normalize:
            vector = normalize(vector, dim=0)
        return vector.numpy().astype("<f4").tobytes()
