"""Continuous batching over a causal language model of the Hugging Face kind, by the generic or the lean forward.

A step feeds a token (and perhaps a guess) to every decoding row, and a chunk of a prompt (or a group of short ones) to
the prefilling ones. The lean forward takes both in one pass over the weights; the generic one takes two, since the
decoding rows would be padded to the chunk's length.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from workers.engine import dtype, speculation
from workers.engine.build import EngineCard
from workers.engine.cache import Place, SlotCache
from workers.engine.fault import NOT_A_NUMBER, Fault
from workers.engine.forward import Forward, HuggingFaceForward, Part
from workers.engine.lean import LeanForward, is_lean
from workers.engine.logprobs import Logprobs
from workers.engine.loop import Drawn
from workers.engine.protocol import Request, Tokens
from workers.engine.sampling import constrain, sample
from workers.engine.scheduler import Chunk, Plan
from workers.engine.sequence import Sequence
from workers.engine.wire import EngineOptions

_PREFILL_CHUNK = 128  # on a CPU: 0.4 s of a 135M model on one core; larger chunks are not faster (measured)
_PREFILL_CHUNK_GPU = 2048
_PROMPT = 8  # tokens of the warm-up
_MEASURED = ((1, 2), (1 + speculation.MOST, 2), (128, 1))  # tokens fed when a step's cost is measured, how often
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
    ready = TransformersModel(forward, max_context, options)
    ready.warm_up()
    ready.measure()
    return ready


def _lean(folder: Path, config: Any, options: EngineOptions) -> Forward:
    return LeanForward(folder, config, dtype.chosen(options), torch.device(options.device), exact=options.exact)


def _generic(folder: Path, max_context: int, options: EngineOptions) -> Forward:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype.chosen(options),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    return HuggingFaceForward(model.to(options.device).eval(), max_context)


class TransformersModel:
    """A causal language model and the KV cache of its running sequences."""

    name = "transformers"

    def __init__(self, forward: Forward, max_context: int, options: EngineOptions) -> None:
        self.max_context = max_context
        self.vocab_size = forward.vocab_size
        self.exact = forward.exact
        self.costs: speculation.Costs | None = None
        self.guesses = options.speculation
        self.joins = forward.joins
        self._forward = forward
        self._device = forward.device
        self.prefill_chunk = _PREFILL_CHUNK if self._device.type == "cpu" else _PREFILL_CHUNK_GPU
        self._cache = SlotCache(forward.layers, options.slots, options.kv_tokens, self._device, exact=forward.exact)

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        self._cache.move(plan.moves)
        self._cache.make_room(plan.rows, plan.longest)
        self._cache.restore(plan.restores)
        decoding, prefilling = _decoding(plan.decode, plan.drafts), _prefilling(plan.prefill, len(plan.decode))
        drawn = iter(self._drawn([batch for batch in (decoding, prefilling) if batch.tokens]))
        verified = [
            each
            for row, (sequence, draft) in enumerate(zip(plan.decode, plan.drafts, strict=True))
            for each in self._verified(row, sequence, draft, list(islice(drawn, len(draft) + 1)))
        ]
        return verified + self._completed(plan.prefill, list(drawn), len(plan.decode))

    def row_length(self, tokens: int) -> int:
        return self._cache.row_length(tokens)

    def warm_up(self) -> None:
        """The first forwards pay for lazy initialisation; no request should."""
        sequence = Sequence(Request("warm-up", (0,) * _PROMPT), arrival=0, need=0)
        self.run(Plan([], [], [Chunk(sequence, _PROMPT)], [], [], rows=1, longest=_PROMPT))
        self._timed(1)

    def measure(self) -> None:
        """See what a step costs, so that guesses can pay for themselves, and prompts hold up nobody."""
        self.costs = speculation.Costs.through(
            *((width, min(self._timed(width) for _ in range(times))) for width, times in _MEASURED)
        )

    def _timed(self, width: int) -> float:
        """Seconds of a step in which the sequence of the warm-up is fed so many tokens."""
        sequence = Sequence(Request("warm-up", (0,) * _PROMPT), arrival=0, need=0, cached=_PROMPT - 1)
        draft = (0,) * (width - 1)
        began = time.perf_counter()
        self.run(Plan([sequence], [draft], [], [], [], rows=1, longest=_PROMPT + len(draft)))
        return time.perf_counter() - began

    def _verified(self, row: int, sequence: Sequence, draft: Tokens, drawn: list[Drawn]) -> list[Drawn]:
        """What was drawn as far as the draft was right, and the one behind that."""
        if any(each.token is NOT_A_NUMBER for each in drawn):
            self._cache.scrub(row, sequence.cached if draft else 0)
            if draft:  # it may be the guess's fault: what is no number spoils those before it, masked or not
                return self._verified(row, sequence, (), self._drawn([_decoding([sequence], [()], row)]))
        right = next((n for n, token in enumerate(draft) if drawn[n].token != token), len(draft))
        return [each._replace(sequence=sequence) for each in drawn[: right + 1]]

    def _completed(self, chunks: list[Chunk], drawn: list[Drawn], first_row: int) -> list[Drawn]:
        """Of those whose prompt is complete, or cannot be completed."""
        for row, each in enumerate(drawn, first_row):
            if each.token is NOT_A_NUMBER:
                self._cache.scrub(row)
        return [
            one for chunk, one in zip(chunks, drawn, strict=True) if chunk.completes or isinstance(one.token, Fault)
        ]

    def _drawn(self, batches: list[_Batch]) -> list[Drawn]:
        """Feed batches; what is drawn at the wanted tokens, in order."""
        if not batches:
            return []
        sequences = [sequence for batch in batches for sequence in batch.sequences]
        logits = self._forward([self._part(batch) for batch in batches], self._cache)
        logprobs, faults = Logprobs(logits, sequences), constrain(logits, sequences)
        drawn: list[Drawn] = []
        for index, (sequence, token) in enumerate(zip(sequences, sample(logits, sequences), strict=True)):
            if token is None:
                drawn.append(Drawn(sequence, NOT_A_NUMBER))
            elif index in faults:
                drawn.append(Drawn(sequence, faults[index]))
            else:
                drawn.append(Drawn(sequence, token, logprobs.of(index, token)))
        return drawn

    def _part(self, batch: _Batch) -> Part:
        width = max(map(len, batch.tokens))
        ids = torch.tensor([[*each, *(0,) * (width - len(each))] for each in batch.tokens], device=self._device)
        wanted = torch.tensor([row * width + n for row, n in batch.wanted], device=self._device)
        return Part(ids, self._cache.aim(batch.place), wanted)


class _Batch(NamedTuple):
    """Rows to feed, and where to draw."""

    place: Place
    tokens: list[Tokens]  # of each row
    wanted: list[tuple[int, int]]  # row and index
    sequences: list[Sequence]  # of each wanted one: as it is to be when that is drawn


def _decoding(sequences: list[Sequence], drafts: list[Tokens], first_row: int = 0) -> _Batch:
    tokens = [sequence.fed(1) + draft for sequence, draft in zip(sequences, drafts, strict=True)]
    place = Place(first_row, [sequence.cached for sequence in sequences], list(map(len, tokens)))
    wanted = [(row, n) for row, each in enumerate(tokens) for n in range(len(each))]
    return _Batch(place, tokens, wanted, [sequences[row].ahead(drafts[row][:n]) for row, n in wanted])


def _prefilling(chunks: list[Chunk], first_row: int) -> _Batch:
    tokens = [chunk.sequence.fed(chunk.length) for chunk in chunks]
    place = Place(first_row, [chunk.sequence.cached for chunk in chunks], [chunk.length for chunk in chunks])
    # Drawn for unfinished prompts too, since that shows NaN before it can spoil a row for who comes next.
    last = [(row, chunk.length - 1) for row, chunk in enumerate(chunks)]
    return _Batch(place, tokens, last, [chunk.sequence for chunk in chunks])


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
