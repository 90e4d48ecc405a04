"""Writes a GGUF file of a few kilobytes that is a whole Llama with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

from workers.engine.scripted import byte_symbols

WIDTH, HEADS, INNER, CONTEXT = 64, 2, 128, 128
BOS, EOS = "<|start|>", "<|end|>"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def write_gguf(path: Path) -> NDArray[np.float32]:
    """Returns the embedding [vocabulary, width] as the quantized file has it."""
    writer = GGUFWriter(path, "llama")
    vocabulary = [*byte_symbols(), "he", BOS, EOS]
    _write_shape(writer, len(vocabulary))
    _write_tokenizer(writer, vocabulary)
    random = np.random.default_rng(3)
    embedding = random.normal(size=(len(vocabulary), WIDTH)).astype(np.float32)
    packed = quantize(embedding, GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    for name, shape in _tensors().items():
        writer.add_tensor(name, random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def _write_shape(writer: GGUFWriter, vocabulary: int) -> None:
    writer.add_license("apache-2.0")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)


def _write_tokenizer(writer: GGUFWriter, vocabulary: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([TokenType.NORMAL] * (len(vocabulary) - 2) + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(vocabulary.index(BOS))
    writer.add_eos_token_id(vocabulary.index(EOS))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _tensors() -> dict[str, tuple[int, ...]]:
    block = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH, WIDTH),
        "attn_v": (WIDTH, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    return {"output_norm.weight": (WIDTH,), **{f"blk.0.{name}.weight": shape for name, shape in block.items()}}
