"""The lean forward: models of the Llama family, written out for batches on few cores.

What it saves against the generic forward: weights packed once for the processor's matrix units, activations and
residuals computed inside the products, one rotation for queries and keys together, no copies of keys and values for
grouped queries, logits of the wanted positions only. Per layer:

    qkv = norm(h) Wqkv;  rotate q, k;  h += attention(q, cached k, v) Wo;  h += (silu(norm(h) Wg) * norm(h) Wu) Wd

Rotary embeddings pair dimension i with i + d/2; here the rows of Wq and Wk are reordered so that a pair lies side by
side and is rotated as one complex number. Scores are sums over all dimensions, so they do not notice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.engine.cache import Aim, Place, SlotCache, SlotLayer
from workers.engine.forward import Part, mask, new_columns
from workers.engine.linear import Linear

log = logging.getLogger(__name__)

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}
_QUERIES = 160
"""In exact mode at most so many at once. torch's CPU attention takes fewer than 192 by blocks of 32, and within a full
block, or one of 16, a query has the same bits whoever shares it; more are packed and rounded another way (measured)."""
_HEADED = 64  # positions whose logits are made at once in exact mode: for so many it was seen to be exact
_PROBE = 544  # tokens: attention takes keys by 512 (cache.py)
_PIECES = [(0, 7), (7, 1), (150, 129), (249, 17), (279, 1), (450, 33), (511, 2), (543, 1)]  # starts and lengths
_ROPES = {"default", "linear", "llama3"}  # those whose angles do not depend on the length so far


def is_lean(config: Any) -> bool:
    """Whether this forward computes what the model's own code would."""
    return (
        (config.architectures or [""])[0] in _FAMILY
        and config.hidden_act == "silu"
        and (config.rope_parameters or {}).get("rope_type", "default") in _ROPES
        and (config.rope_parameters or {}).get("partial_rotary_factor", 1) == 1
        and not getattr(config, "use_sliding_window", False)
        and not getattr(config, "quantization_config", None)
    )


class _Norm:
    """RMS norm in four operations, of which torch's takes eight: between products that push everything else out of the
    caches, what counts is how many there are."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = len(weight)
        self._weight = weight.float() * width**0.5
        self._least = torch.tensor((width * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, of each row."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._least)
        normed: Tensor = (x / length).mul_(self._weight)
        return normed.to(x.dtype)


class _Layer(NamedTuple):
    norm: _Norm
    qkv: Linear
    out: Linear
    mlp_norm: _Norm
    gate: Linear
    up: Linear
    down: Linear


class _Group(NamedTuple):
    """Tokens whose rows are fed equally many."""

    aim: Aim
    tokens: int
    hidden_from: Tensor


class LeanForward:
    """Weights of one model, ready to run."""

    joins = True

    def __init__(
        self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device, *, exact: bool = False
    ) -> None:
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self.device = device
        self._dtype = dtype
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        rope = LlamaRotaryEmbedding(config)
        self._frequencies = rope.inv_freq.float().to(device)
        self._rope_scale = float(rope.attention_scaling)
        with ExitStack() as stack:
            weights = _Weights(stack, folder, dtype, device)
            self._embedding = weights.tensor("model.embed_tokens.weight")
            self._layers = [self._read(weights, f"model.layers.{index}") for index in range(self.layers)]
            self._norm = _Norm(weights.tensor("model.norm.weight"), self._eps)
            tied = config.tie_word_embeddings or not weights.has("lm_head.weight")
            self._head = Linear(self._embedding if tied else weights.tensor("lm_head.weight"))
        self.exact = exact and dtype is torch.float32 and device.type == "cpu"
        if self.exact:
            self.exact = self._is_exact()
            log.info("texts %s depend on batches", "do not" if self.exact else "on this machine")

    def __call__(self, parts: list[Part], cache: SlotCache) -> Tensor:
        x = torch.cat([embedding(part.ids.flatten(), self._embedding) for part in parts])
        starts = accumulate((part.ids.numel() for part in parts), initial=0)
        wanted = torch.cat([part.wanted + start for part, start in zip(parts, starts, strict=False)])
        h = self._through(self._layers, x, [(part.aim, part.ids.shape[1]) for part in parts], cache)
        x = self._norm(h[wanted])
        if not self.exact:
            return self._head(x)
        return torch.cat([self._head(part) for part in torch.split(x, _HEADED)]) if len(x) > _HEADED else self._head(x)

    def _through(self, layers: list[_Layer], x: Tensor, fed: list[tuple[Aim, int]], cache: SlotCache) -> Tensor:
        """States [tokens, width] of new tokens, through some layers; `fed` says where, and how many in each row."""
        columns = [new_columns(*each) for each in fed]
        rotation = self._rotation(torch.cat([each.flatten() for each in columns]))
        # Queries that share a head of keys stand one behind the other, as if they were so many tokens.
        grouped = self._heads // self._kv_heads
        groups = [
            _Group(aim, each.numel(), mask(each, aim.reach, self._dtype).repeat(1, 1, grouped, 1))
            for (aim, _), each in zip(fed, columns, strict=True)
        ]
        for layer, slots in zip(layers, cache.slots, strict=True):
            x = self._layer(layer, x, slots, cache, rotation, groups)
        return x

    def _layer(
        self, layer: _Layer, h: Tensor, slots: SlotLayer, cache: SlotCache, rotation: Tensor, groups: list[_Group]
    ) -> Tensor:
        """One layer. `h` [tokens, width]; `rotation` [tokens, 1, dim / 2]."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        qkv = layer.qkv(layer.norm(h)).view(len(h), heads + 2 * kv_heads, dim)
        qk, v = _rotated(qkv[:, : heads + kv_heads], rotation), qkv[:, heads + kv_heads :]
        counts = [group.tokens for group in groups]
        attended = []
        for group, part, values in zip(groups, torch.split(qk, counts), torch.split(v, counts), strict=True):
            cache.aimed = group.aim
            attended.append(self._attended(part, values, slots, group.hidden_from))
        h = layer.out.added_to(h, attended[0] if len(attended) == 1 else torch.cat(attended))
        x = layer.mlp_norm(h)
        return layer.down.added_to(h, layer.up.times(layer.gate.silu(x), x))

    def _attended(self, qk: Tensor, v: Tensor, slots: SlotLayer, hidden_from: Tensor) -> Tensor:
        """What the tokens of one group take from their rows [tokens, heads * dim], in whose cache they are put."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        rows = len(hidden_from)
        new = len(qk) // rows
        qk, v = qk.view(rows, new, heads + kv_heads, dim), torch.unflatten(v, 0, (rows, new))
        keys, values = slots.update(qk[:, :, heads:].transpose(1, 2), v.transpose(1, 2))
        q = qk[:, :, :heads].view(rows, new, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        attended = self._attention(q, keys, values, hidden_from).view(rows, kv_heads, -1, new, dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(rows * new, heads * dim)

    def _attention(self, q: Tensor, keys: Tensor, values: Tensor, hidden_from: Tensor) -> Tensor:
        """Of q [rows, heads of keys, queries, dim]. Exact mode gives torch's CPU kernel blocks of one kind only."""
        if not self.exact:
            return scaled_dot_product_attention(q, keys, values, attn_mask=hidden_from)
        parts = []
        for part, seen in zip(torch.split(q, _QUERIES, 2), torch.split(hidden_from, _QUERIES, 2), strict=True):
            attended = scaled_dot_product_attention(_filled(part), keys, values, attn_mask=_filled(seen))
            parts.append(attended[:, :, : part.shape[2]])
        return torch.cat(parts, dim=2)

    @torch.inference_mode()
    def _is_exact(self) -> bool:
        """Whether the kernels of this machine keep the promise: a layer and the head, over a text as a whole, and over
        pieces of it, alone and beside one that stands elsewhere."""
        text = torch.randn((_PROBE, self._embedding.shape[1]), generator=torch.Generator().manual_seed(0))
        cache = SlotCache(1, 2, 0, self.device, exact=True)
        cache.make_room(2, 2 * _PROBE)
        whole = self._probed(text, cache, [0], _PROBE)
        same = all(
            torch.equal(self._probed(text, cache, starts, length), whole[start : start + length])
            for start, length in _PIECES
            for starts in ([start], [start, 0], [start, 2 * _PROBE - length])
        )
        logits = self._head(whole[:_HEADED])
        return same and all(torch.equal(self._head(whole[:rows]), logits[:rows]) for rows in (1, 2, 5, 16, 31))

    def _probed(self, text: Tensor, cache: SlotCache, starts: list[int], length: int) -> Tensor:
        """The first row's states after the first layer."""
        aim = cache.aim(Place(0, starts, [length] * len(starts)))
        tokens = torch.arange(length) + torch.tensor(starts)[:, None]
        return self._through(self._layers[:1], text[tokens.flatten() % _PROBE], [(aim, length)], cache)[:length]

    def _rotation(self, columns: Tensor) -> Tensor:
        angles = columns.float()[:, None] * self._frequencies
        return torch.polar(torch.full_like(angles, self._rope_scale), angles)[:, None]

    def _read(self, weights: _Weights, name: str) -> _Layer:
        pairs = self._pairs()
        q, k, v = (weights.linear(f"{name}.self_attn.{part}_proj") for part in "qkv")
        q, k = (_reordered(part, pairs, self._dim) for part in (q, k))
        bias = None if q.bias is None else torch.cat([part.bias for part in (q, k, v) if part.bias is not None])
        return _Layer(
            norm=_Norm(weights.tensor(f"{name}.input_layernorm.weight"), self._eps),
            qkv=Linear(torch.cat([q.weight, k.weight, v.weight]), bias),
            out=Linear(*weights.linear(f"{name}.self_attn.o_proj")),
            mlp_norm=_Norm(weights.tensor(f"{name}.post_attention_layernorm.weight"), self._eps),
            gate=Linear(*weights.linear(f"{name}.mlp.gate_proj")),
            up=Linear(*weights.linear(f"{name}.mlp.up_proj")),
            down=Linear(*weights.linear(f"{name}.mlp.down_proj")),
        )

    def _pairs(self) -> Tensor:
        """Where each dimension of a head comes from: 0, d/2, 1, d/2 + 1, ..."""
        return torch.arange(self._dim, device=self.device).view(2, -1).t().flatten()


def _filled(x: Tensor) -> Tensor:
    """With the last query of [.., queries, ..] repeated up to a full block: of 16, or of any number of times 32."""
    count = x.shape[2]
    more = (16 if count <= 16 else -(-count // 32) * 32) - count
    return torch.cat([x, x[:, :, -1:].expand(-1, -1, more, -1)], dim=2) if more else x


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class _Raw(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None


def _reordered(raw: _Raw, pairs: Tensor, dim: int) -> _Raw:
    weight = raw.weight.view(-1, dim, raw.weight.shape[-1])[:, pairs].flatten(0, 1)
    return _Raw(weight, None if raw.bias is None else raw.bias.view(-1, dim)[:, pairs].flatten())


class _Weights:
    """The model's safetensors, one tensor at a time."""

    def __init__(self, stack: ExitStack, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._files = dict(_open_all(stack, folder))
        self._dtype, self._device = dtype, device

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found.to(self._device, self._dtype)

    def linear(self, name: str) -> _Raw:
        bias = f"{name}.bias"
        return _Raw(self.tensor(f"{name}.weight"), self.tensor(bias) if self.has(bias) else None)


def _open_all(stack: ExitStack, folder: Path) -> Iterator[tuple[str, Any]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise OSError(f"{folder} holds no *.safetensors, and nothing else is read")
    for path in paths:
        opened = stack.enter_context(safe_open(path, framework="pt"))
        yield from ((name, opened) for name in opened.keys())  # noqa: SIM118 (it is no mapping)
