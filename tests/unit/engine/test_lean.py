"""The lean forward against Hugging Face's own: random shapes, whole and in pieces, alone and beside others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from tests.unit.engine.test_exact import needs_onednn
from workers.engine.cache import Place, SlotCache
from workers.engine.forward import Part
from workers.engine.lean import LeanForward, is_lean

CPU = torch.device("cpu")
LENGTH = 600  # more than the 512 keys that torch's attention takes at once


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_config(chance: random.Random) -> PreTrainedConfig:
    kv_heads, dim = chance.choice([1, 2, 3]), chance.choice([8, 16, 64])
    heads = kv_heads * chance.choice([1, 2, 4])
    shape: dict[str, Any] = {
        "vocab_size": chance.randrange(50, 400),
        "hidden_size": heads * dim,
        "intermediate_size": chance.randrange(30, 200),
        "num_hidden_layers": chance.randrange(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": chance.random() < 0.5,
        "rms_norm_eps": chance.choice([1e-6, 1e-5]),
        "rope_parameters": chance.choice(ROPES),
        "initializer_range": 0.2,
    }
    biases: dict[str, Any] = {name: chance.random() < 0.5 for name in ("attention_bias", "mlp_bias")}
    kinds: list[PreTrainedConfig] = [
        LlamaConfig(**shape, **biases),
        MistralConfig(**shape, sliding_window=None),
        Qwen2Config(**shape),
    ]
    return chance.choice(kinds)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
]


def saved(config: PreTrainedConfig, folder: Path) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return model


def lean(folder: Path, *, exact: bool = False) -> LeanForward:
    return LeanForward(folder, AutoConfig.from_pretrained(folder), torch.float32, CPU, exact=exact)


def pieces(chance: random.Random, longest: int) -> Iterator[int]:
    left = LENGTH
    while left:
        length = min(left, chance.choice([1, 1, 2, 5, 16, 31, 33, 64, longest]))
        left -= length
        yield length


@torch.inference_mode()
def logits(forward: LeanForward, text: Tensor, lengths: list[int], ahead: list[int]) -> dict[int, Tensor]:
    """By the position of each piece's last token. Beside `text` stand others like it, so many tokens ahead."""
    rows = 1 + len(ahead)
    cache = SlotCache(forward.layers, rows, 0, CPU, exact=forward.exact)
    cache.make_room(rows, LENGTH + max(ahead, default=0))
    found, start = {}, 0
    for length in lengths:
        aim = cache.aim(Place(0, [start, *(start + each for each in ahead)], [length] * rows))
        ids = text[start : start + length].expand(rows, -1)
        start += length
        found[start - 1] = forward([Part(ids, aim, torch.tensor([length - 1]))], cache)[0]
    return found


@pytest.mark.parametrize("seed", range(8))
@torch.inference_mode()
def test_its_logits_are_those_of_the_models_own_code(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = random_config(chance)
    model = saved(config, tmp_path)
    assert is_lean(AutoConfig.from_pretrained(tmp_path))
    text = torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    expected = model(text[None]).logits[0]
    assert expected.std() > 0.1
    found = logits(lean(tmp_path), text, list(pieces(chance, longest=250)), ahead=[0, 3])
    torch.testing.assert_close(torch.stack(list(found.values())), expected[list(found)], atol=2e-3, rtol=2e-3)


@needs_onednn
@pytest.mark.parametrize("seed", range(4))
def test_exact_logits_are_the_same_bits_in_whatever_pieces_and_company(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = random_config(chance)
    saved(config, tmp_path)
    forward = lean(tmp_path, exact=True)
    assert forward.exact
    text = torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    decoded = logits(forward, text, [200] + [1] * (LENGTH - 200), ahead=[])
    for longest, ahead in ((128, []), (250, [0, 40]), (33, [chance.randrange(600)]), (LENGTH, [500, 1, 200])):
        found = logits(forward, text, list(pieces(chance, longest)), ahead)
        assert [position for position in found.keys() & decoded if not found[position].equal(decoded[position])] == []


def test_quantized_weights_are_left_to_the_models_own_code() -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"])
    assert is_lean(config)
    config.quantization_config = {"quant_method": "fp8"}
    assert not is_lean(config)
