"""Which numbers a model computes with when nobody says."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.unit.engine.conftest import OPTIONS
from workers.engine.dtype import chosen, fast_bf16


@pytest.mark.parametrize(
    ("device", "exact", "expected"),
    [
        ("cpu", True, torch.float32),
        ("cpu", False, torch.bfloat16 if fast_bf16() else torch.float32),
        ("cuda", True, torch.bfloat16),
        ("cuda:1", False, torch.bfloat16),
    ],
)
def test_it_is_exact_where_that_is_wanted_and_fast_elsewhere(device: str, exact: bool, expected: torch.dtype) -> None:
    assert chosen(msgspec.structs.replace(OPTIONS, dtype="auto", device=device, exact=exact)) is expected


def test_what_is_named_is_taken() -> None:
    assert chosen(msgspec.structs.replace(OPTIONS, dtype="float16")) is torch.float16


@pytest.mark.parametrize("name", ["int8", "nonsense", "nn"])
def test_what_is_no_number_to_compute_with_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        chosen(msgspec.structs.replace(OPTIONS, dtype=name))
