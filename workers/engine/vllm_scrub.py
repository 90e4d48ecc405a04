"""Keeps NaN of one sequence from the others in vLLM's cache on a CPU.

A sequence whose numbers are none leaves them in its blocks. Its kernels multiply what they mask by zero, and zero times
NaN is NaN: so who gets such a block next would fail too, although it masks all of it (vLLM 0.32, seen). On GPUs the
kernels are others, and a look at each step's logits would be a wait for the device: there it is not taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate


class ScrubbedCache(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """A logits processor, since that sees every step in the process that has the cache, before a block can be freed."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._looks = device.type == "cpu"
        self._layers = vllm_config.compilation_config.static_forward_context

    def is_argmax_invariant(self) -> bool:
        return False  # else it is not called for a batch that is all greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [sequences, vocabulary], which stay as they are: vLLM counts what is no number in them."""
        if self._looks and bool(logits.isnan().any()):
            for layer in self._layers.values():
                layer.kv_cache.nan_to_num_()
        return logits
