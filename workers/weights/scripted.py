"""Makes the folders of scripted models: a byte-level tokenizer, a small chat template, and no weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from brokers.job import Kind
from brokers.models import Card
from workers.engine.scripted import byte_symbols
from workers.engine.scripted_encoder import DIMENSIONS
from workers.weights.folder import check_name, new_folder, write_card

BOS, EOS, TURN = "<|start|>", "<|end|>", "<|turn|>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """256 bytes and three special tokens; no merges, so that each byte is a token."""
    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (BOS, EOS, TURN)])
    return tokenizer


def create_scripted_model(models_dir: Path, name: str, options: dict[str, Any] | None = None) -> Card:
    """Write the folder and return its card, in place of a model of that name; `options` as in engine.scripted."""
    check_name(name)
    tokenizer = byte_tokenizer()
    card = Card(
        name=name,
        kind=Kind.TEXT,
        engine="scripted",
        max_context=8192,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.get_vocab()[EOS],),
        bos_token=BOS,
        eos_token=EOS,
        chat_template=_CHAT_TEMPLATE,
        license="Apache-2.0",
        source="scripted",
        parameters=0,
        created=int(time.time()),
        options=options or {},
    )
    return _write(models_dir, card, tokenizer)


def create_scripted_embedder(models_dir: Path, name: str, options: dict[str, Any] | None = None) -> Card:
    """Likewise, of a model that makes embeddings, see engine.scripted_encoder."""
    check_name(name)
    tokenizer = byte_tokenizer()
    card = Card(
        name=name,
        kind=Kind.EMBEDDING,
        engine="scripted",
        max_context=512,
        vocab_size=tokenizer.get_vocab_size(),
        dimensions=DIMENSIONS,
        license="Apache-2.0",
        source="scripted",
        parameters=0,
        created=int(time.time()),
        options=options or {},
    )
    return _write(models_dir, card, tokenizer)


def _write(models_dir: Path, card: Card, tokenizer: Tokenizer) -> Card:
    with new_folder(models_dir, card.name) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        write_card(folder, card)
    return card
