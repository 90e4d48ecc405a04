"""Makes an engine from a model's folder. It reads the card itself: the engine does not know the platform's registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from workers.engine.loop import BatchEngine, BatchModel
from workers.engine.wire import EngineOptions


class EngineCard(msgspec.Struct, frozen=True):
    """What an engine needs of lingbot.json."""

    engine: str
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    options: dict[str, Any] = {}


def read_card(folder: Path) -> EngineCard:
    return msgspec.json.decode((folder / "lingbot.json").read_bytes(), type=EngineCard)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def build_engine(folder: Path, options: EngineOptions) -> BatchEngine:
    """The engine that the folder's card names, loaded and warm. ValueError when there is none of that name."""
    card = read_card(folder)
    return BatchEngine(
        build_model(folder, card, options),
        slots=options.slots,
        kv_tokens=options.kv_tokens,
        prefix_tokens=options.prefix_tokens,
        eos_ids=card.eos_token_ids,
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
    raise ValueError(f"{folder} asks for an engine named {card.engine!r}; there are 'transformers' and 'scripted'")
