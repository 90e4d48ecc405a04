"""How a model of the sentence-transformers kind makes its vectors, read from the files beside its weights.

modules.json                 Transformer, Pooling and, for vectors of length 1, Normalize, in this order
<Pooling's path>/config.json which pooling
sentence_bert_config.json    the longest input
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from brokers.errors import ConfigurationError

_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODES = "pooling_mode_"


class Recipe(NamedTuple):
    """What happens around the forward."""

    pooling: str
    normalize: bool
    max_input: int | None  # tokens, special ones included


def recipe_of(source: Path) -> Recipe | None:
    """The recipe of a model's folder; None when it is not of this kind. Raises ConfigurationError for a recipe that
    would not be followed here."""
    if not (source / "modules.json").is_file():
        return None
    modules = _read(source / "modules.json", list[dict[str, Any]])
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigurationError(
            f"its modules are {', '.join(kinds)}; Transformer, Pooling and Normalize are what is known"
        )
    transformer, pooling = (source / _inside(module) for module in modules[:2])
    limits = _optional(transformer / "sentence_bert_config.json") or _optional(source / "sentence_bert_config.json")
    _check_text(limits, _optional(source / "config_sentence_transformers.json"))
    return Recipe(_pooling(_optional(pooling / "config.json")), len(kinds) == 3, limits.get("max_seq_length"))


def _pooling(config: dict[str, Any]) -> str:
    modes = sorted(name for name, on in config.items() if name.startswith(_MODES) and on is True)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        found = " and ".join(name.removeprefix(_MODES) for name in modes) or "none"
        raise ConfigurationError(f"its pooling is {found}; mean_tokens and cls_token are what is known")
    return _POOLINGS[modes[0]]


def _check_text(limits: dict[str, Any], config: dict[str, Any]) -> None:
    """Whatever changes a text before it is tokenized would be left out here."""
    if limits.get("do_lower_case"):
        raise ConfigurationError("it asks for text in lower case, which its tokenizer should see to")
    if config.get("default_prompt_name"):
        raise ConfigurationError("it puts a prompt before each text, which is not done here")


def _inside(module: dict[str, Any]) -> str:
    path = str(module.get("path", ""))
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigurationError(f"modules.json names {path[:80]!r}, which is outside the model's folder")
    return path


def _optional(path: Path) -> dict[str, Any]:
    return _read(path, dict[str, Any]) if path.is_file() else {}


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path.name} is not what it should be: {error}") from error
