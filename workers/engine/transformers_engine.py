"""Continuous batching over a causal language model of the Hugging Face kind, by the generic or the lean forward.

A step has at most two forwards: one token for every decoding row, and one chunk (or a group of short prompts) for
the prefilling ones. Together in one forward, the decoding rows would be padded to the chunk's length.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from workers.engine import dtype, speculation
from workers.engine.build import EngineCard
from workers.engine.cache import Place, SlotCache
from workers.engine.fault import NOT_A_NUMBER, Fault
from workers.engine.forward import Forward, HuggingFaceForward
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
_WIDTHS = (1, 1 + speculation.MOST, 128)  # tokens fed when a step's cost is measured; 128 are the guesses of 14 rows
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
    if options.speculation:
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

    def __init__(self, forward: Forward, max_context: int, slots: int, kv_tokens: int) -> None:
        self.max_context = max_context
        self.vocab_size = forward.vocab_size
        self.exact = forward.exact
        self.costs: speculation.Costs | None = None
        self._forward = forward
        self._device = forward.device
        self.prefill_chunk = _PREFILL_CHUNK if self._device.type == "cpu" else _PREFILL_CHUNK_GPU
        self._cache = SlotCache(forward.layers, slots, kv_tokens, self._device, exact=forward.exact)

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        self._cache.move(plan.moves)
        self._cache.make_room(plan.rows, plan.longest)
        self._cache.restore(plan.restores)
        drawn = self._decode(plan.decode, plan.drafts) if plan.decode else []
        return drawn + (self._prefill(plan.prefill, len(plan.decode)) if plan.prefill else [])

    def row_length(self, tokens: int) -> int:
        return self._cache.row_length(tokens)

    def warm_up(self) -> None:
        """The first forwards pay for lazy initialisation; no request should."""
        for _ in range(2):
            self._timed(width=1)

    def measure(self) -> None:
        """See what a step costs, so that guessing ahead can pay for itself."""
        self.costs = speculation.Costs.through(
            *((width, min(self._timed(width) for _ in range(2))) for width in _WIDTHS)
        )

    def _timed(self, width: int) -> float:
        """Seconds of a step in which one sequence is fed so many tokens."""
        sequence = Sequence(Request("warm-up", (0,) * _PROMPT), arrival=0, need=0)
        self.run(Plan([], [], [Chunk(sequence, _PROMPT)], [], [], rows=1, longest=_PROMPT))
        sequence.cached = _PROMPT - 1
        draft = (0,) * (width - 1)
        began = time.perf_counter()
        self.run(Plan([sequence], [draft], [], [], [], rows=1, longest=_PROMPT + len(draft)))
        return time.perf_counter() - began

    def _decode(self, sequences: list[Sequence], drafts: list[Tokens], first_row: int = 0) -> list[Drawn]:
        tokens = [sequence.fed(1) + draft for sequence, draft in zip(sequences, drafts, strict=True)]
        place = Place(first_row, [sequence.cached for sequence in sequences], list(map(len, tokens)))
        fed = [(row, n) for row, each in enumerate(tokens) for n in range(len(each))]
        drawn = iter(self._drawn(place, tokens, fed, [sequences[row].ahead(drafts[row][:n]) for row, n in fed]))
        return [
            each
            for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True), first_row)
            for each in self._verified(row, sequence, draft, list(islice(drawn, len(draft) + 1)))
        ]

    def _verified(self, row: int, sequence: Sequence, draft: Tokens, drawn: list[Drawn]) -> list[Drawn]:
        """What was drawn as far as the draft was right, and the one behind that."""
        if any(each.token is NOT_A_NUMBER for each in drawn):
            self._cache.scrub(row, sequence.cached if draft else 0)
            if draft:  # it may be the guess's fault: what is no number spoils those before it, masked or not
                return self._decode([sequence], [()], row)
        right = next((n for n, token in enumerate(draft) if drawn[n].token != token), len(draft))
        return [each._replace(sequence=sequence) for each in drawn[: right + 1]]

    def _prefill(self, chunks: list[Chunk], first_row: int) -> list[Drawn]:
        tokens = [chunk.sequence.fed(chunk.length) for chunk in chunks]
        place = Place(first_row, [chunk.sequence.cached for chunk in chunks], [chunk.length for chunk in chunks])
        # Drawn for unfinished prompts too, since that shows NaN before it can spoil a row for who comes next.
        last = [(row, chunk.length - 1) for row, chunk in enumerate(chunks)]
        drawn = self._drawn(place, tokens, last, [chunk.sequence for chunk in chunks])
        for row, each in enumerate(drawn, first_row):
            if each.token is NOT_A_NUMBER:
                self._cache.scrub(row)
        return [
            one for chunk, one in zip(chunks, drawn, strict=True) if chunk.completes or isinstance(one.token, Fault)
        ]

    def _drawn(
        self, place: Place, tokens: list[Tokens], wanted: list[tuple[int, int]], sequences: list[Sequence]
    ) -> list[Drawn]:
        """Feed `tokens`, a list for each row; what is drawn at the `wanted` ones (row, index), each by its sequence."""
        logits = self._logits(place, tokens, wanted)
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

    def _logits(self, place: Place, tokens: list[Tokens], wanted: list[tuple[int, int]]) -> Tensor:
        """Logits [wanted, vocabulary]."""
        self._cache.aim(place)
        width = max(map(len, tokens))
        ids = torch.tensor([[*each, *(0,) * (width - len(each))] for each in tokens], device=self._device)
        places = torch.tensor([row * width + n for row, n in wanted], device=self._device)
        return self._forward(ids, self._cache, places)


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
