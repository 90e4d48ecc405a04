"""Continuous batching over a causal language model of the Hugging Face kind, by the generic or the lean forward.

A step has at most two forwards: one token for every decoding row, and one chunk (or a group of short prompts) for
the prefilling ones. Together in one forward, the decoding rows would be padded to the chunk's length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from workers.engine.build import EngineCard
from workers.engine.cache import Place, SlotCache
from workers.engine.fault import NOT_A_NUMBER, Fault
from workers.engine.forward import Forward, HuggingFaceForward
from workers.engine.lean import LeanForward, is_lean
from workers.engine.logprobs import Logprobs
from workers.engine.loop import Drawn
from workers.engine.protocol import Request
from workers.engine.sampling import constrain, sample
from workers.engine.scheduler import Chunk, Plan, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.wire import EngineOptions

_PREFILL_CHUNK = 128  # on a CPU: 0.4 s of a 135M model on one core; larger chunks are not faster (measured)
_PREFILL_CHUNK_GPU = 2048
_ATTENTION = {"full_attention", "sliding_attention"}


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's `options` for a model of this engine."""

    forward: Literal["auto", "generic"] = "auto"  # auto: the lean one where it knows the architecture


def load_model(folder: Path, card: EngineCard, options: EngineOptions) -> TransformersModel:
    """Load and warm up. Only safetensors are read and no code of the model's is run. ValueError when it cannot be."""
    torch.set_num_threads(max(1, options.threads))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    max_context = min(card.max_context, _exact_context(config))
    lean = msgspec.convert(card.options, Options).forward == "auto" and is_lean(config)
    forward = _lean(folder, config, options) if lean else _generic(folder, max_context, options)
    ready = TransformersModel(forward, max_context, options.slots, options.kv_tokens)
    ready.warm_up()
    return ready


def _lean(folder: Path, config: Any, options: EngineOptions) -> Forward:
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    return LeanForward(folder, config, dtype, device, exact=options.exact)


def _generic(folder: Path, max_context: int, options: EngineOptions) -> Forward:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, options.dtype),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    return HuggingFaceForward(model.to(options.device).eval(), max_context)


class TransformersModel:
    """A causal language model and the KV cache of its running sequences."""

    def __init__(self, forward: Forward, max_context: int, slots: int, kv_tokens: int) -> None:
        self.max_context = max_context
        self.vocab_size = forward.vocab_size
        self.exact = forward.exact
        self._forward = forward
        self._device = forward.device
        self.prefill_chunk = _PREFILL_CHUNK if self._device.type == "cpu" else _PREFILL_CHUNK_GPU
        self._cache = SlotCache(forward.layers, slots, kv_tokens, self._device, exact=forward.exact)

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        self._cache.move(plan.moves)
        self._cache.make_room(plan.rows, plan.longest)
        self._cache.restore(plan.restores)
        drawn = self._decode(plan.decode) if plan.decode else []
        return drawn + (self._prefill(plan.prefill, len(plan.decode)) if plan.prefill else [])

    def row_length(self, tokens: int) -> int:
        return self._cache.row_length(tokens)

    def warm_up(self) -> None:
        """The first forwards pay for lazy initialisation; no request should."""
        scheduler = Scheduler(slots=1, kv_tokens=16, prefill_chunk=self.prefill_chunk)
        scheduler.add(Request("warm-up", (0,) * 8), need=16)
        for _ in range(2):
            plan = scheduler.schedule()
            for drawn in self.run(plan):
                drawn.sequence.output.append(0)
            scheduler.advance(plan)

    def _decode(self, sequences: list[Sequence]) -> list[Drawn]:
        place = Place(0, [sequence.cached for sequence in sequences], [1] * len(sequences))
        ids = torch.tensor([sequence.fed(1) for sequence in sequences])
        return self._drawn(sequences, self._logits(ids, place), first_row=0)

    def _prefill(self, chunks: list[Chunk], first_row: int) -> list[Drawn]:
        lengths = [chunk.length for chunk in chunks]
        ids = torch.zeros((len(chunks), max(lengths)), dtype=torch.int64)
        for row, chunk in zip(ids, chunks, strict=True):
            row[: chunk.length] = torch.tensor(chunk.sequence.fed(chunk.length))
        place = Place(first_row, [chunk.sequence.cached for chunk in chunks], lengths)
        # Drawn for unfinished prompts too, since that shows NaN before it can spoil a row for who comes next.
        drawn = self._drawn([chunk.sequence for chunk in chunks], self._logits(ids, place), first_row)
        return [
            one for chunk, one in zip(chunks, drawn, strict=True) if chunk.completes or isinstance(one.token, Fault)
        ]

    def _logits(self, ids: Tensor, place: Place) -> Tensor:
        """Logits [rows, vocabulary] after the last own token of each row of `ids` [rows, new]."""
        self._cache.aim(place)
        wanted = torch.tensor(place.lengths, device=self._device) - 1
        return self._forward(ids.to(self._device), self._cache, wanted)

    def _drawn(self, sequences: list[Sequence], logits: Tensor, first_row: int) -> list[Drawn]:
        logprobs, faults = Logprobs(logits, sequences), constrain(logits, sequences)
        drawn: list[Drawn] = []
        for index, (sequence, token) in enumerate(zip(sequences, sample(logits, sequences), strict=True)):
            if token is None:
                self._cache.scrub(first_row + index)
                drawn.append(Drawn(sequence, NOT_A_NUMBER))
            elif index in faults:
                drawn.append(Drawn(sequence, faults[index]))
            else:
                drawn.append(Drawn(sequence, token, logprobs.of(index, token)))
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
