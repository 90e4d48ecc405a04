"""A matrix product with what follows it, by the fastest way of the device.

On a CPU the weight is packed once into the layout of oneDNN's kernels, and only that is kept. In f32 a row of such a
product has the same bits whatever rows are beside it (measured, see tests/unit/engine/test_exact.py), but for one row
alone, which is therefore computed twice over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from workers.engine.dtype import fast_bf16

_ROWS = 64  # packed for about so many rows at once; fewer and more are right too, and not slower (measured)
_PACKED: Any = torch.ops.mkldnn._linear_pointwise


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return fast_bf16()
    return weight.dtype == torch.float32


class Linear:
    """x W^T + b for x [rows, in]; `weight` is [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packs = _packs(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self._packs else weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed(x, "none") if self._packs else linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return self._packed(x, "swish") if self._packs else silu(linear(x, self._weight, self._bias))

    def times(self, other: Tensor, x: Tensor) -> Tensor:
        """`other` times the product, element by element."""
        return self._joined(x, other, "mul") if self._packs else other * linear(x, self._weight, self._bias)

    def added_to(self, other: Tensor, x: Tensor) -> Tensor:
        return self._joined(x, other, "add") if self._packs else other + linear(x, self._weight, self._bias)

    def _packed(self, x: Tensor, then: str) -> Tensor:
        y: Tensor = _PACKED(_two(x), self._weight, self._bias, then, [], None)
        return y[: len(x)]

    def _joined(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        y: Tensor = _PACKED.binary(_two(x), _two(other), self._weight, self._bias, how)
        return y[: len(x)]


def _two(x: Tensor) -> Tensor:
    return x.expand(2, -1).contiguous() if len(x) == 1 else x
