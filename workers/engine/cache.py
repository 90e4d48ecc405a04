"""The KV cache: one preallocated rectangle a layer, passed to the model as its own cache.

    keys, values   [rows, heads, length, dim]   row r holds one sequence, its token t at [r, :, t]

A row's tokens start at 0 and are followed by room, so positions are indices, and sequences of any length share a
forward under a mask. The model is given views, never copies: rows in use are dense (see scheduler.py), and the view
ends soon after the longest of them. The rectangle grows in steps and is only then copied. What lies behind a row's
end is masked, but must stay finite: a weight of zero times NaN is NaN. So new room is zeroed, and `scrub` cleans a
row whose sequence came to have NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from workers.engine.prefix import BLOCK, Copy
from workers.engine.scheduler import Keep, Move, Restore

_BLOCK = 256  # tokens by which rows get longer
_ALIGN = 32  # the view ends at a multiple of it: attention over fewer keys takes other ways, and other roundings
_SPLIT = 512  # keys that torch's CPU attention takes at once: their sum is split where there are more than half of it

_Block = tuple[Tensor, Tensor]
"""Keys and values [heads, BLOCK, dim] of one layer, kept beside the rectangle."""


@dataclass(slots=True)
class Place:
    """Where the forward in hand writes and reads: rows first .. first + len(starts)."""

    first: int
    starts: list[int]  # of each row: the column of its first new token
    lengths: list[int]  # of each row: how many of the forward's tokens are its own, the rest is padding

    @property
    def end(self) -> int:
        """Of the fullest row, in tokens."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))


class Aim(NamedTuple):
    """A place, ready for a forward."""

    place: Place
    reach: int  # the view's length, in tokens
    row_index: Tensor  # [rows]
    column_index: Tensor  # [rows], of each row's first new token


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is typed in parts
    """One layer's rectangle."""

    is_sliding = False
    keys: Tensor  # the base allows None before the first update
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self._cache.shape
        self.keys = key_states.new_zeros((rows, key_states.shape[1], length, key_states.shape[3]))
        self.values = value_states.new_zeros((rows, value_states.shape[1], length, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens [rows, heads, new, dim]; views of all tokens up to the longest row's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        aim = self._cache.aimed
        return self._write(self.keys, key_states, aim), self._write(self.values, value_states, aim)

    def _write(self, store: Tensor, new: Tensor, aim: Aim) -> Tensor:
        place = aim.place
        rows = store[place.first : place.first + len(place.starts)]
        if new.shape[2] == 1:
            rows[aim.row_index, :, aim.column_index] = new[:, :, 0]
        else:
            for row, start, length in zip(range(len(place.starts)), place.starts, place.lengths, strict=True):
                rows[row, :, start : start + length] = new[row, :, :length]
        return rows[:, :, : aim.reach]

    def reshape(self, rows: int, length: int) -> None:
        if self.is_initialized:
            self.keys = _resized(self.keys, rows, length)
            self.values = _resized(self.values, rows, length)

    def move(self, move: Move) -> None:
        for store in (self.keys, self.values):
            store[move.target, :, : move.length] = store[move.source, :, : move.length]

    def keep(self, row: int, copies: list[Copy], blocks: dict[int, _Block]) -> None:
        for block, start in copies:
            for kept, store in zip(blocks[block], (self.keys, self.values), strict=True):
                kept.copy_(store[row, :, start : start + BLOCK])

    def restore(self, restore: Restore, blocks: dict[int, _Block]) -> None:
        end = restore.start + len(restore.blocks) * BLOCK
        for part, store in enumerate((self.keys, self.values)):
            kept = torch.cat([blocks[block][part] for block in restore.blocks], dim=1)
            store[restore.row, :, restore.start : end] = kept

    def scrub(self, row: int, start: int) -> None:
        self.keys[row, :, start:].zero_()
        self.values[row, :, start:].zero_()

    def get_seq_length(self) -> int:
        return self._cache.aimed.reach

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.aimed.reach, 0


class SlotCache(Cache):
    """All layers' rectangles, of at most `slots` rows and about `kv_tokens` tokens.

    `exact`: what the attention is given of a row has lengths at which torch's CPU kernel adds up in one order.
    """

    def __init__(self, layers: int, slots: int, kv_tokens: int, device: torch.device, *, exact: bool = False) -> None:
        self.slots = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slots))
        self._blocks: list[dict[int, _Block]] = [{} for _ in self.slots]  # of each layer, by number
        self.shape = (0, 0)  # rows, length
        self._most_rows = slots
        self._kv_tokens = kv_tokens
        self._device = device
        self._exact = exact
        self.aimed: Aim
        self.aim(Place(0, [0], [1]))

    def aim(self, place: Place) -> Aim:
        """Read and write there from here on, until `aimed` is set to another one."""
        rows = torch.arange(len(place.starts), device=self._device)
        starts = torch.tensor(place.starts, device=self._device)
        self.aimed = Aim(place, self.row_length(place.end), rows, starts)
        return self.aimed

    def row_length(self, tokens: int) -> int:
        """How long a row must be to hold so many tokens."""
        length = -(-tokens // _ALIGN) * _ALIGN
        # Measured in tests/unit/engine/test_exact.py: 288 .. 480 keys are added up in two halves, 512 in two of 256.
        return -(-length // _SPLIT) * _SPLIT if self._exact and length % _SPLIT > _SPLIT // 2 else length

    def make_room(self, rows: int, length: int) -> None:
        """Have at least `rows` rows of `length` tokens."""
        shape = self._grown(rows, self.row_length(length))
        if shape != self.shape:
            self.shape = shape
            for layer in self.slots:
                layer.reshape(*shape)

    def move(self, moves: list[Move | Keep]) -> None:
        """Close gaps that sequences left, and keep blocks of them, in order."""
        for move in moves:
            for layer, blocks in zip(self.slots, self._blocks, strict=True):
                if isinstance(move, Keep):
                    self._make_blocks(layer, blocks, move)
                    layer.keep(move.row, move.copies, blocks)
                elif move.length:
                    layer.move(move)

    def restore(self, restores: list[Restore]) -> None:
        """Put kept blocks into rows."""
        for restore in restores:
            for layer, blocks in zip(self.slots, self._blocks, strict=True):
                layer.restore(restore, blocks)

    def _make_blocks(self, layer: SlotLayer, blocks: dict[int, _Block], keep: Keep) -> None:
        for block in {copy.block for copy in keep.copies} - blocks.keys():
            keys, values = (torch.empty_like(store[0, :, :BLOCK]) for store in (layer.keys, layer.values))
            blocks[block] = keys, values

    def scrub(self, row: int, start: int = 0) -> None:
        """Forget what a row holds from position `start` on."""
        for layer in self.slots:
            layer.scrub(row, start)

    def _grown(self, rows: int, length: int) -> tuple[int, int]:
        if rows <= self.shape[0] and length <= self.shape[1]:
            return self.shape
        roomy_rows = max(self.shape[0], min(1 << (rows - 1).bit_length(), self._most_rows))
        roomy_length = max(self.shape[1], -(-length // _BLOCK) * _BLOCK)
        if roomy_rows * roomy_length <= self._kv_tokens:
            return roomy_rows, roomy_length
        # The scheduler keeps rows x length within the budget; what the shape had in excess is given up.
        return rows, max(length, min(-(-length // _BLOCK) * _BLOCK, self._kv_tokens // rows // _ALIGN * _ALIGN))


def _resized(store: Tensor, rows: int, length: int) -> Tensor:
    fresh = store.new_zeros((rows, store.shape[1], length, store.shape[3]))
    kept_rows, kept_length = min(rows, store.shape[0]), min(length, store.shape[2])
    fresh[:kept_rows, :, :kept_length] = store[:kept_rows, :, :kept_length]
    return fresh
