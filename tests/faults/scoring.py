"""The real model as its own judge: whatever workers came and went, each token is one that it gives for what precedes
it. One forward pass over prompt and text scores all of them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from brokers.models import Model
from tests.faults.checker import Stream
from tests.faults.load import Work

_TOLERANCE = 1e-3  # of a logit: f32 rounds with the shape of the batch


class Judge:
    """Scores greedy texts of one model in f32."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(Path(model.folder) / "tokenizer.json"))
        self._network = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)  # in eval mode

    def faults(self, work: Work, stream: Stream) -> list[str]:
        """What of a greedy text the model would not have said, or what is not the text of its tokens."""
        tokens, prompt = stream.token_ids, list(self._model.encode(work.prompt))
        found = [] if self._tokenizer.decode(tokens) == stream.text else ["its text is not that of its tokens"]
        with torch.inference_mode():
            logits = self._network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        for n, token in enumerate(tokens):
            short = float(best[n] - logits[n, token])
            if short > _TOLERANCE:
                found.append(f"token {n} of {len(tokens)} is {short:.4f} below the model's own choice")
        if stream.job.finish_reason == "stop":
            ends = list(self._model.card.eos_token_ids)
            if float(best[-1] - logits[-1, ends].max()) > _TOLERANCE:
                found.append("it ends where the model would have gone on")
        return [f"{stream.job.id}: {fault}" for fault in found]
