"""A random Llama with the byte-level test tokenizer, as small as vLLM's kernels allow (heads of 32)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brokers.job import Kind
from brokers.models import Card
from workers.weights.folder import write_card
from workers.weights.scripted import byte_tokenizer

BOS, EOS, POISON = 256, 257, 258
"""POISON has an embedding that is no number: whoever has it in the prompt has NaN for logits, keys and values."""


def create_random_llama(models_dir: Path, name: str) -> Path:
    folder = models_dir / name
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,  # large, so that the next token depends on the whole context
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
        model.lm_head.weight[POISON] = 0.0  # hardly ever drawn
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    card = Card(
        name=name,
        kind=Kind.TEXT,
        engine="transformers",
        max_context=2048,
        vocab_size=259,
        eos_token_ids=(EOS,),
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )
    write_card(folder, card)
    return folder
