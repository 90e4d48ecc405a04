"""Continuous batching over a Hugging Face causal language model.

A step has at most two forwards: one token for every decoding row, and one chunk (or a group of short prompts) for
the prefilling ones. Together in one forward, the decoding rows would be padded to the chunk's length.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from workers.engine.build import EngineCard
from workers.engine.cache import Place, SlotCache
from workers.engine.loop import Drawn, Fault
from workers.engine.protocol import Request
from workers.engine.sampling import sample
from workers.engine.scheduler import Chunk, Plan, Scheduler, Sequence
from workers.engine.wire import EngineOptions

_NOT_A_NUMBER = Fault("numeric_error", "the model's output is not a number for this sequence")
_PREFILL_CHUNK = 128  # on a CPU: 0.4 s of a 135M model on one core; larger chunks are not faster (measured)
_PREFILL_CHUNK_GPU = 2048
_ATTENTION = {"full_attention", "sliding_attention"}


def load_model(folder: Path, card: EngineCard, options: EngineOptions) -> TransformersModel:
    """Load and warm up. Only safetensors are read and no code of the model's is run. ValueError when it cannot be."""
    torch.set_num_threads(max(1, options.threads))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    max_context = min(card.max_context, _exact_context(config))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, options.dtype),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    ready = TransformersModel(model.to(options.device).eval(), max_context, options.slots, options.kv_tokens)
    ready.warm_up()
    return ready


class TransformersModel:
    """A causal language model and the KV cache of its running sequences."""

    def __init__(self, model: Any, max_context: int, slots: int, kv_tokens: int) -> None:
        config = model.config.get_text_config()
        self.max_context = max_context
        self.vocab_size = config.vocab_size
        self._model = model
        self._device = model.device
        self.prefill_chunk = _PREFILL_CHUNK if self._device.type == "cpu" else _PREFILL_CHUNK_GPU
        self._cache = SlotCache(config.num_hidden_layers, slots, kv_tokens, self._device)
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.2x
        self._keeps_logits = "logits_to_keep" in known

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        self._cache.move(plan.moves)
        self._cache.make_room(plan.rows, plan.longest)
        drawn = self._decode(plan.decode) if plan.decode else []
        return drawn + (self._prefill(plan.prefill, len(plan.decode)) if plan.prefill else [])

    def warm_up(self) -> None:
        """The first forwards pay for lazy initialisation; no request should."""
        scheduler = Scheduler(slots=1, kv_tokens=16, prefill_chunk=self.prefill_chunk)
        scheduler.add(Request("warm-up", (0,) * 8), need=16)
        for _ in range(2):
            plan = scheduler.schedule()
            for sequence, _token in self.run(plan):
                sequence.output.append(0)
            scheduler.advance(plan)

    def _decode(self, sequences: list[Sequence]) -> list[Drawn]:
        starts = [sequence.cached for sequence in sequences]
        ids = torch.tensor([sequence.fed(1) for sequence in sequences], device=self._device)
        logits = self._forward(ids, Place(0, starts, [1] * len(starts)))[:, -1]
        return self._drawn(sequences, logits, first_row=0)

    def _prefill(self, chunks: list[Chunk], first_row: int) -> list[Drawn]:
        lengths = [chunk.length for chunk in chunks]
        ids = torch.zeros((len(chunks), max(lengths)), dtype=torch.int64)
        for row, chunk in zip(ids, chunks, strict=True):
            row[: chunk.length] = torch.tensor(chunk.sequence.fed(chunk.length))
        place = Place(first_row, [chunk.sequence.cached for chunk in chunks], lengths)
        last = sorted({length - 1 for length in lengths})
        logits = self._forward(ids.to(self._device), place, keep=last)
        own = logits[torch.arange(len(chunks)), [last.index(length - 1) for length in lengths]]
        # Drawn for unfinished prompts too, since that shows NaN before it can spoil a row for who comes next.
        drawn = self._drawn([chunk.sequence for chunk in chunks], own, first_row)
        return [
            (sequence, token)
            for chunk, (sequence, token) in zip(chunks, drawn, strict=True)
            if chunk.completes or isinstance(token, Fault)
        ]

    def _forward(self, ids: Tensor, place: Place, keep: list[int] | None = None) -> Tensor:
        """Logits [rows, positions to keep, vocabulary] of tokens [rows, new], in the rows where `place` says."""
        self._cache.aim(place)
        columns = self._cache.column_index[:, None] + torch.arange(ids.shape[1], device=self._device)
        wanted = {"logits_to_keep": torch.tensor(keep, device=self._device)} if keep and self._keeps_logits else {}
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=self._mask(columns, place.reach),
            position_ids=columns.clamp(max=self.max_context - 1),  # padding must not leave a table of positions
            use_cache=True,
            **{self._cache_argument: self._cache},
            **wanted,
        ).logits
        return logits[:, keep] if keep and not self._keeps_logits else logits

    def _mask(self, columns: Tensor, reach: int) -> Tensor:
        """Additive mask [rows, 1, new, reach]: a token sees its row up to itself."""
        hidden = torch.arange(reach, device=self._device) > columns[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _drawn(self, sequences: list[Sequence], logits: Tensor, first_row: int) -> list[Drawn]:
        drawn: list[Drawn] = []
        for row, (sequence, token) in enumerate(zip(sequences, sample(logits, sequences), strict=True), first_row):
            if token is None:
                self._cache.scrub(row)
            drawn.append((sequence, _NOT_A_NUMBER if token is None else token))
        return drawn


def _exact_context(config: Any) -> int:
    """How many tokens this cache serves exactly: a sliding window is full attention while it is not yet full."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION
    if kinds:
        raise ValueError(f"the model has layers of kind {sorted(kinds)}; this engine caches plain attention only")
    limits: list[int | None] = [getattr(text, name, None) for name in ("max_position_embeddings", "sliding_window")]
    if limits[0] is None:
        raise ValueError("the model does not say max_position_embeddings, so its positions are of an unknown kind")
    return min(limit for limit in limits if limit)
