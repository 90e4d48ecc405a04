"""The transformers engine against transformers itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from brokers.models import Model
from tests.unit.engine.conftest import OPTIONS
from tests.unit.engine.driving import Record, ask, drain, prompt, run, step_until
from workers.engine.build import EngineCard, build_engine
from workers.engine.lean import LeanForward
from workers.engine.loop import BatchEngine
from workers.engine.protocol import Request, SamplingParams
from workers.engine.transformers_engine import load_model


def generate(folder: Path, ids: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens by transformers' generate(), alone in its batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([ids])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    new: list[int] = output[0, len(ids) :].tolist()
    return new


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def test_greedy_output_equals_generate_while_others_join_and_leave(tiny_folder: Path) -> None:
    texts = ["a", "the sea and the river", "x" * 300, "Stop", "what is it that we read at noon?", "zz"]
    engine, record = build_engine(tiny_folder, OPTIONS), Record()
    for number, text in enumerate(texts):
        engine.submit(ask(str(number), text, greedy(20 + 7 * number)))
        for _ in range(3):
            record.take(engine.step())
    drain(engine, record)
    for number, text in enumerate(texts):
        assert record.tokens[str(number)] == generate(tiny_folder, prompt(text), 20 + 7 * number)


SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "learned positions": lambda: GPT2Config(
        vocab_size=259, n_embd=48, n_layer=2, n_head=6, n_positions=512, initializer_range=0.5
    ),
    "parallel residual": lambda: GPTNeoXConfig(**SHAPE),
    "biased projections": lambda: Qwen2Config(**SHAPE, num_key_value_heads=2),
    "scaled rotation": lambda: LlamaConfig(
        **SHAPE,
        num_key_value_heads=3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "length-dependent rotation": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "tied, wide heads": lambda: LlamaConfig(**SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "sliding window": lambda: MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=128),
    "eager attention": lambda: Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=128),
}


LEAN = {"biased projections", "sliding window", "scaled rotation", "tied, wide heads"}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_architectures_of_all_kinds_equal_generate(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(ARCHITECTURES[kind]())  # type: ignore[no-untyped-call]
    for bias in (weight for name, weight in model.named_parameters() if name.endswith("bias")):
        torch.nn.init.normal_(bias, std=0.5)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, EngineCard("transformers", 512), OPTIONS)
    assert isinstance(loaded._forward, LeanForward) == (kind in LEAN)
    engine = BatchEngine(loaded, slots=4, kv_tokens=2048)
    texts = ["the sea", "a", "what is the longest river of all?"]
    record = run(engine, *(ask(text, text, greedy(20)) for text in texts))
    for text in texts:
        assert record.tokens[text] == generate(tmp_path, prompt(text), 20)


def test_the_tiny_model_says_something(tiny_folder: Path) -> None:
    """Equality with generate() means little for a model that repeats one token."""
    tokens = run(build_engine(tiny_folder, OPTIONS), ask("a", sampling=greedy(40))).tokens["a"]
    assert len(set(tokens)) > 15


@pytest.mark.model
def test_the_demo_model_answers_as_generate_does(smollm2_dir: Path) -> None:
    model = Model(smollm2_dir)
    questions = ["What is the capital of France?", "Why is the sky blue?", "Write a haiku about rain."]
    prompts = [model.encode_chat([{"role": "user", "content": question}]) for question in questions]
    engine = build_engine(smollm2_dir, OPTIONS)
    record = run(engine, *(Request(str(n), ids, sampling=greedy(16)) for n, ids in enumerate(prompts)))
    for number, ids in enumerate(prompts):
        assert record.tokens[str(number)] == generate(smollm2_dir, ids, 16)
    assert "Paris" in model.tokenizer.decode(record.tokens["0"])


def test_the_models_own_end_token_ends_with_stop(tiny_folder: Path) -> None:
    tokens = run(build_engine(tiny_folder, OPTIONS), ask("a", sampling=greedy(40))).tokens["a"]
    end = tokens[9]
    model = build_engine(tiny_folder, OPTIONS)
    assert isinstance(model, BatchEngine)
    model._eos_ids = frozenset({end})
    record = run(model, ask("a", sampling=SamplingParams(max_tokens=40, temperature=0)))
    assert record.tokens["a"] == tokens[: tokens.index(end)]
    assert record.finish("a") == "stop"


def _embedding(forward: Any) -> Any:
    if isinstance(forward, LeanForward):
        return forward._embedding
    return forward._model.model.embed_tokens.weight.requires_grad_(False)


@pytest.mark.parametrize("forward", ["auto", "generic"])
def test_a_sequence_of_nan_fails_alone_and_leaves_its_row_clean(tiny_folder: Path, forward: str) -> None:
    card = EngineCard("transformers", 512, options={"forward": forward})
    engine = BatchEngine(load_model(tiny_folder, card, OPTIONS), slots=4, kv_tokens=2048)
    record, expected = Record(), run(build_engine(tiny_folder, OPTIONS), ask("good"), ask("next", "zz")).tokens
    weights = _embedding(engine._model._forward)  # type: ignore[attr-defined]
    weights[7] = torch.nan  # token 7 poisons whoever has it, in its keys and values too
    engine.submit(ask("good"))
    step_until(engine, record, "good", 2)
    engine.submit(Request("bad", (65, 7, 66), sampling=greedy(9)))
    while "bad" not in record.ends:
        record.take(engine.step())
    engine.submit(ask("next", "zz"))  # in the row that the bad one left
    drain(engine, record)
    assert record.ends["bad"].error_code == "numeric_error"
    assert record.tokens["good"] == expected["good"]
    assert record.tokens["next"] == expected["next"]


def test_a_model_whose_layers_need_another_cache_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "tiny")
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    config["layer_types"] = ["full_attention", "chunked_attention"]
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(ValueError, match="chunked_attention"):
        build_engine(folder, OPTIONS)


def test_pickled_weights_are_not_read(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        build_engine(folder, OPTIONS)
