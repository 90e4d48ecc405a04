"""The model registry: names, limits, tokenizer and chat template, read from the origin folder. No torch in here.

Layout of the origin, one folder a model, made by `lingbot models import`:

    <models_dir>/<name>/lingbot.json     the card below
                        tokenizer.json   of the `tokenizers` library
                        config.json, generation_config.json, *.safetensors    for a real engine
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from brokers.errors import ConfigurationError, PromptRejected, UnknownModel
from brokers.job import Kind
from brokers.spelling import Spelling

log = logging.getLogger(__name__)

CARD = "lingbot.json"
_RESCAN_S = 2.0  # how soon an imported or removed model is seen


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the platform needs to know of a model before any worker has loaded it."""

    name: str
    kind: Kind
    engine: str  # "transformers" | "vllm" | "scripted"
    max_context: int  # prompt + output tokens; of an embedding model those of one input
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    license: str | None = None
    source: str | None = None
    parameters: int | None = None
    created: int = 0  # unix seconds
    dimensions: int = 0  # of an embedding model's vectors
    options: dict[str, Any] = {}  # for the engine


class Model:
    """A card with its tokenizer, for the door: counting and rendering."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.card = read_card(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.spelling = Spelling(self.tokenizer)
        self._template = _compile(self.card.chat_template) if self.card.chat_template else None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a text; `special` adds what the tokenizer puts around a plain prompt."""
        # The batch form leaves out the offsets, which takes a third off the time.
        return tuple(self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_all(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Token ids of each text, as `encode` gives them."""
        return [tuple(encoded.ids) for encoded in self.tokenizer.encode_batch_fast(texts, add_special_tokens=True)]

    def encode_chat(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the assistant's answer. Raises PromptRejected."""
        if self._template is None:
            raise PromptRejected(
                f"model {self.card.name!r} has no chat template", hint="Send `prompt` instead of `messages`."
            )
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self.card.bos_token or "",
                eos_token=self.card.eos_token or "",
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptRejected(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, special=False)  # the template writes the special tokens itself


class Registry:
    """All models of the origin, seen afresh every two seconds. Safe to share between threads.

    One that cannot be read, or is of a newer version of Lingbot, is left out and logged: the others are served.
    """

    def __init__(self, models_dir: Path) -> None:
        self._dir = models_dir
        self._lock = threading.Lock()
        self._models: dict[str, Model] = {}
        self._stamps: dict[str, int | None] = {}
        self._scanned = 0.0

    def all(self) -> list[Model]:
        self._rescan()
        return [self._models[name] for name in sorted(self._models)]

    def get(self, name: str) -> Model:
        """The model of that name. Raises UnknownModel."""
        self._rescan()
        try:
            return self._models[name]
        except KeyError:
            raise UnknownModel(f"there is no model named {name[:80]!r}") from None

    def spelling(self, name: str) -> Spelling:
        """Of that model's tokens; they have no bytes any more when the model is gone."""
        self._rescan()
        model = self._models.get(name)
        return model.spelling if model else Spelling()

    def _rescan(self) -> None:
        if time.monotonic() - self._scanned < _RESCAN_S:
            return
        with self._lock:
            if time.monotonic() - self._scanned < _RESCAN_S:
                return
            stamps = {path.parent.name: _stamp(path) for path in self._dir.glob(f"*/{CARD}")}
            known = {name for name, stamp in stamps.items() if self._stamps.get(name) == stamp}
            models = {name: self._models[name] for name in known if name in self._models}
            models |= {name: model for name in stamps.keys() - known if (model := self._read(name))}
            self._models, self._stamps = models, stamps
            self._scanned = time.monotonic()

    def _read(self, name: str) -> Model | None:
        try:
            return Model(self._dir / name)
        except ConfigurationError as error:
            log.error("model %s is left out: %s", name, error.message)
        except Exception as error:  # noqa: BLE001 (tokenizers and templates raise what they like)
            log.error("model %s is left out: %s: %s", name, type(error).__name__, error)
        return None


def _stamp(path: Path) -> int | None:
    """None of a file that is being removed, or that a dangling link names."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def read_card(folder: Path) -> Card:
    try:
        card = msgspec.json.decode((folder / CARD).read_bytes(), type=Card)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{folder / CARD} is no model card: {error}") from error
    if card.name != folder.name:
        raise ConfigurationError(f"{folder / CARD} names the model {card.name!r}, its folder another")
    return card


def _compile(template: str) -> Any:
    # The template comes with the model, from outside: sandboxed, and it cannot change what it is given.
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = time.strftime
    env.filters["tojson"] = lambda value, **_: msgspec.json.encode(value).decode()
    return env.from_string(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)
