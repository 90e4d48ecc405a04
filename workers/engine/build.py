"""Makes an engine from a model's folder. It reads the card itself: the engine does not know the platform's registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from workers.engine.embedding import EmbeddingEngine, Encoder
from workers.engine.guide import GuideMaker
from workers.engine.loop import BatchEngine, BatchModel
from workers.engine.protocol import Embedder, Engine
from workers.engine.wire import EngineOptions

_EXCHANGEABLE = frozenset({"transformers", "vllm"})  # they read the same weights


class EngineCard(msgspec.Struct, frozen=True):
    """What an engine needs of lingbot.json."""

    engine: str
    max_context: int
    kind: str = "text"
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    options: dict[str, Any] = {}


def read_card(folder: Path) -> EngineCard:
    return msgspec.json.decode((folder / "lingbot.json").read_bytes(), type=EngineCard)


def chosen_card(card: EngineCard, engine: str) -> EngineCard:
    """The card with the engine that is to run it; the card's options are for the one that it names itself."""
    if engine in {"", card.engine} or card.engine not in _EXCHANGEABLE:
        return card
    return msgspec.structs.replace(card, engine=engine, options={})


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def build_engine(folder: Path, options: EngineOptions) -> Engine:
    """The engine that the options or the folder's card name, loaded and warm. ValueError when there is none of that
    name."""
    card = chosen_card(read_card(folder), options.engine)
    if card.engine == "vllm":
        from workers.engine.vllm_engine import load_engine

        return load_engine(folder, card, options)
    model = build_model(folder, card, options)
    return BatchEngine(
        model,
        slots=options.slots,
        kv_tokens=options.kv_tokens,
        prefix_tokens=options.prefix_tokens,
        pause_grace_s=options.pause_grace_s,
        eos_ids=card.eos_token_ids,
        guides=GuideMaker(folder / "tokenizer.json", model.vocab_size, card.eos_token_ids),
    )


def build_model(folder: Path, card: EngineCard, options: EngineOptions) -> BatchModel:
    if card.engine == "scripted":
        from workers.engine.scripted import Options, ScriptedModel

        return ScriptedModel(
            load_tokenizer(folder),
            max_context=card.max_context,
            eos_id=card.eos_token_ids[0] if card.eos_token_ids else None,
            options=msgspec.convert(card.options, Options),
        )
    if card.engine == "transformers":
        from workers.engine.transformers_engine import load_model  # torch takes seconds and 300 MB to import

        return load_model(folder, card, options)
    raise ValueError(f"{folder} asks for an engine named {card.engine!r}; there are transformers, vllm and scripted")


def makes_vectors(folder: Path) -> bool:
    """Whether the folder's model is for build_embedder, not for build_engine."""
    return read_card(folder).kind == "embedding"


def build_embedder(folder: Path, options: EngineOptions) -> Embedder:
    """The engine of an embedding model, loaded and warm. ValueError when the card names none that there is."""
    card = read_card(folder)
    return EmbeddingEngine(_encoder(folder, card, options), name=card.engine, slots=options.slots)


def _encoder(folder: Path, card: EngineCard, options: EngineOptions) -> Encoder:
    if card.engine == "scripted":
        from workers.engine.scripted import Options
        from workers.engine.scripted_encoder import ScriptedEncoder

        return ScriptedEncoder(load_tokenizer(folder), card.max_context, msgspec.convert(card.options, Options))
    if card.engine == "transformers":
        from workers.engine.encoder import load_encoder

        return load_encoder(folder, card, options)
    raise ValueError(f"{folder} asks for an engine named {card.engine!r}; vectors come from transformers and scripted")
