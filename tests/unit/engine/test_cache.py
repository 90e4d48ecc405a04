"""The cache's rectangle grows and changes its shape within its budget, and keeps what it holds."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workers.engine.cache import Place, SlotCache

SLOTS, KV_TOKENS, ALIGN = 8, 4096, 32


def cache() -> SlotCache:
    return SlotCache(layers=2, slots=SLOTS, kv_tokens=KV_TOKENS, device=torch.device("cpu"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, SLOTS), st.integers(1, KV_TOKENS)), min_size=1, max_size=12))
def test_it_has_room_and_stays_within_the_budget(wanted: list[tuple[int, int]]) -> None:
    slots = cache()
    for rows, length in wanted:
        if rows * length <= KV_TOKENS:
            slots.make_room(rows, length)
            assert slots.shape[0] >= rows
            assert slots.shape[1] >= length
            assert slots.shape[0] <= SLOTS
            assert slots.shape[0] * slots.shape[1] < KV_TOKENS + SLOTS * ALIGN


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, SLOTS), st.integers(1, 600)), min_size=2, max_size=6))
def test_a_change_of_shape_keeps_the_rows_in_use(wanted: list[tuple[int, int]]) -> None:
    assume(all(rows * length <= KV_TOKENS for rows, length in wanted))
    slots = cache()
    slots.make_room(*wanted[0])
    slots.aim(Place(0, [0], [3]))
    new = torch.randn(1, 2, 3, 4)
    slots.update(new, -new, layer_idx=1)
    for rows, length in wanted[1:]:
        slots.make_room(rows, max(3, length))
    slots.aim(Place(0, [3], [1]))
    more = torch.randn(1, 2, 1, 4)
    slots.make_room(1, 4)
    keys, values = slots.update(more, -more, layer_idx=1)
    assert torch.equal(keys[:, :, :4], torch.cat([new, more], dim=2))
    assert not keys[:, :, 4:].any()
    assert torch.equal(values, -keys)


def test_padding_is_not_written() -> None:
    slots = cache()
    slots.make_room(2, 8)
    slots.aim(Place(0, [0, 0], [4, 2]))
    new = torch.ones(2, 1, 4, 1)
    keys, _ = slots.update(new, new, layer_idx=0)
    assert keys[:, 0, :5, 0].tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert not keys[:, 0, 5:].any()


def test_the_model_gets_views_and_no_copies() -> None:
    slots = cache()
    slots.make_room(2, 8)
    slots.aim(Place(0, [0, 0], [1, 1]))
    new = torch.ones(2, 1, 1, 4)
    keys, _ = slots.update(new, new, layer_idx=0)
    again, _ = slots.update(new, new, layer_idx=0)
    assert keys.data_ptr() == again.data_ptr()
    assert keys.shape == (2, 1, ALIGN, 4)
