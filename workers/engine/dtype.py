"""The numbers a model computes with, where they are left to the engine."""

from __future__ import annotations

import torch

from workers.engine.wire import EngineOptions


def chosen(options: EngineOptions) -> torch.dtype:
    """What `options.dtype` names. "auto" is bf16 on an accelerator, and on a CPU that multiplies it in hardware unless
    texts are to be exact, for which only f32 will do there. ValueError when the name is of no such numbers."""
    if options.dtype != "auto":
        named = getattr(torch, options.dtype, None)
        if not (isinstance(named, torch.dtype) and named.is_floating_point):
            raise ValueError(f"dtype {options.dtype!r} is none of auto, float32, bfloat16 and float16")
        return named
    on_cpu = torch.device(options.device).type == "cpu"
    return torch.float32 if on_cpu and (options.exact or not fast_bf16()) else torch.bfloat16


def fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; without, it is slower than f32."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]
