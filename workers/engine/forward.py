"""A forward: tokens in, logits of some positions out. Here the generic one, of Hugging Face's own model code.

Whatever forward runs, the runner (transformers_engine.py) keeps rows, chunks and the cache.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workers.engine.cache import Aim, SlotCache


class Part(NamedTuple):
    """Rows that are fed equally many tokens each; those of decoding sequences are one, those of prompts another."""

    ids: Tensor  # [rows, new]
    aim: Aim
    wanted: Tensor  # which tokens of `ids`, counted row by row


class Forward(Protocol):
    """A loaded model."""

    vocab_size: int
    layers: int
    device: torch.device
    exact: bool  # the logits of a row depend on its tokens alone, to the bit

    joins: bool  # its parts share one pass over the weights

    def __call__(self, parts: list[Part], cache: SlotCache) -> Tensor:
        """Logits [wanted, vocabulary] after the wanted tokens of all parts, in order.

        The cache comes to hold the keys and values of what is fed.
        """


class HuggingFaceForward:
    """Any causal language model with a standard cache."""

    exact = joins = False

    def __init__(self, model: Any, max_context: int) -> None:
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self.device: torch.device = model.device
        self._model = model
        self._max_context = max_context
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.2x
        self._keeps_logits = "logits_to_keep" in known

    def __call__(self, parts: list[Part], cache: SlotCache) -> Tensor:
        return torch.cat([self._logits(part, cache) for part in parts])

    def _logits(self, part: Part, cache: SlotCache) -> Tensor:
        ids, cache.aimed, wanted = part
        columns = new_columns(part.aim, ids.shape[1])
        rows, positions = wanted // ids.shape[1], wanted % ids.shape[1]
        kept, which = torch.unique(positions, return_inverse=True)
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask(columns, part.aim.reach, self._model.dtype),
            position_ids=columns.clamp(max=self._max_context - 1),  # padding must not leave a table of positions
            use_cache=True,
            **{self._cache_argument: cache},
            **({"logits_to_keep": kept} if self._keeps_logits else {}),
        ).logits
        return logits[rows, which if self._keeps_logits else positions]


def new_columns(aim: Aim, new: int) -> Tensor:
    """Where in its row each of the `new` tokens of each row stands: [rows, new]."""
    return aim.column_index[:, None] + torch.arange(new, device=aim.column_index.device)


def mask(columns: Tensor, reach: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [rows, 1, new, reach]: a token sees its row up to itself."""
    hidden = torch.arange(reach, device=columns.device) > columns[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=columns.device).masked_fill_(hidden, -torch.inf)
