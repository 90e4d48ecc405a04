"""The embedding engine: each input gets its own vector, in order, whatever shares its batches or was done before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from brokers.job import Kind
from brokers.models import Card
from tests.unit.engine.test_host import Listener
from workers.engine.build import build_embedder
from workers.engine.embedding import EmbeddingEngine, Encoder
from workers.engine.fault import Fault
from workers.engine.host import EngineHost
from workers.engine.protocol import EmbedRequest, Output, Tokens
from workers.engine.scripted_encoder import scripted_vector
from workers.engine.wire import EngineOptions
from workers.weights.folder import write_card
from workers.weights.scripted import byte_tokenizer, create_scripted_embedder

OPTIONS = EngineOptions(slots=4, kv_tokens=2048, threads=1, device="cpu", dtype="float32")
TOLERANCE = 1e-5


class Noted:
    """What came of each request."""

    def __init__(self) -> None:
        self.vectors: dict[str, list[bytes]] = {}
        self.ends: dict[str, Output] = {}

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.seq not in self.ends, "nothing follows the last Output of a request"
            self.vectors.setdefault(output.seq, []).extend(output.vectors)
            if output.finish:
                self.ends[output.seq] = output


def drain(engine: EmbeddingEngine, noted: Noted | None = None) -> Noted:
    noted = noted or Noted()
    for _ in range(2000):
        if engine.idle:
            return noted
        noted.take(engine.step())
    raise AssertionError("the engine does not come to rest")


def inputs(count: int, longest: int, vocabulary: int, seed: int) -> tuple[Tokens, ...]:
    chance = random.Random(seed)
    return tuple(
        tuple(chance.randrange(1, vocabulary) for _ in range(chance.randrange(1, longest))) for _ in range(count)
    )


class Plain:
    """An encoder whose vectors tell what they were made of."""

    max_input = 64
    vocab_size = 100
    dimensions = 4
    budget = 64

    def __init__(self) -> None:
        self.batches: list[int] = []

    def run(self, given: list[Tokens], dimensions: list[int]) -> list[bytes | Fault]:
        self.batches.append(len(given))
        bad = Fault("numeric_error", "13 is bad luck")
        made = zip(given, dimensions, strict=True)
        return [bad if 13 in tokens else scripted_vector(tokens, kept) for tokens, kept in made]


def engine_of(encoder: Encoder | None = None, clock: Callable[[], float] = lambda: 0.0) -> EmbeddingEngine:
    return EmbeddingEngine(encoder or Plain(), clock=clock)


# --- the loop -----------------------------------------------------------------------------------------------------


def test_vectors_come_in_the_order_of_the_inputs() -> None:
    engine, given = engine_of(), {name: inputs(70, 60, 13, seed) for seed, name in enumerate("abc")}
    for name, each in given.items():
        engine.submit(EmbedRequest(name, each, dimensions=3))
    noted = drain(engine)
    for name, each in given.items():
        assert noted.vectors[name] == [scripted_vector(tokens, 3) for tokens in each]
        assert noted.ends[name].finish == "stop"


def test_what_is_done_is_not_made_again() -> None:
    engine, given = engine_of(), inputs(40, 60, 13, 5)
    engine.submit(EmbedRequest("a", given, done=25))
    engine.submit(EmbedRequest("over", given, done=40))
    noted = drain(engine)
    assert noted.vectors["a"] == [scripted_vector(tokens) for tokens in given[25:]]
    assert (noted.vectors["over"], noted.ends["over"].finish) == ([], "stop")
    assert engine.stats().generated_tokens == 15


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (EmbedRequest("a", ()), "empty_prompt"),
        (EmbedRequest("a", ((1,), ())), "empty_prompt"),
        (EmbedRequest("a", ((1,) * 65,)), "context_exceeded"),
        (EmbedRequest("a", ((100,),)), "bad_token"),
        (EmbedRequest("a", ((-1,),)), "bad_token"),
        (EmbedRequest("a", ((1,),), dimensions=5), "invalid_parameter"),
    ],
)
def test_a_bad_request_fails_alone(request_: EmbedRequest, code: str) -> None:
    engine = engine_of()
    engine.submit(EmbedRequest("good", ((1, 2),)))
    engine.submit(request_)
    noted = drain(engine)
    assert (noted.ends["a"].finish, noted.ends["a"].error_code) == ("error", code)
    assert noted.ends["good"].finish == "stop"


def test_a_second_one_of_the_same_name_is_refused() -> None:
    engine = engine_of()
    engine.submit(EmbedRequest("a", ((1,),)))
    engine.submit(EmbedRequest("a", ((1,),)))
    (refused, _) = engine.step()
    assert refused.error_code == "duplicate_sequence"


def test_an_input_that_is_no_number_fails_its_request_and_no_neighbour() -> None:
    engine = engine_of()
    engine.submit(EmbedRequest("bad", ((1, 2), (13, 1), (3, 4))))
    engine.submit(EmbedRequest("good", ((5, 6), (7, 8))))
    noted = drain(engine)
    assert (noted.ends["bad"].finish, noted.ends["bad"].error_code) == ("error", "numeric_error")
    assert noted.vectors["good"] == [scripted_vector((5, 6)), scripted_vector((7, 8))]


def test_abort_pause_and_resume() -> None:
    engine, given, noted = engine_of(), inputs(60, 60, 13, 7), Noted()
    for name in "ab":
        engine.submit(EmbedRequest(name, given))
    noted.take(engine.step())
    engine.pause("a")
    engine.abort("b")
    engine.abort("nobody")
    drain(engine, noted)
    assert noted.ends["b"].finish == "cancelled"
    assert "a" not in noted.ends
    assert engine.stats().paused == 1
    engine.resume("a")
    drain(engine, noted)
    assert noted.vectors["a"] == [scripted_vector(tokens) for tokens in given]


def test_a_deadline_ends_a_request_also_when_it_is_paused() -> None:
    now = [0.0]
    engine = engine_of(clock=lambda: now[0])
    engine.submit(EmbedRequest("a", inputs(60, 60, 13, 7), deadline=1.0))
    engine.pause("a")
    assert engine.idle
    now[0] = 1.0
    assert not engine.idle
    assert drain(engine).ends["a"].finish == "expired"


def test_who_is_begun_is_told_once_and_before_the_batch() -> None:
    encoder, told = Plain(), list[tuple[list[str], int]]()
    engine = engine_of(encoder)
    engine.on_begin = lambda seqs: told.append((seqs, len(encoder.batches)))
    engine.submit(EmbedRequest("a", ((1,) * 60,) * 3))
    engine.step()
    engine.submit(EmbedRequest("b", ((2,) * 60,)))
    drain(engine)
    assert [seqs for seqs, _ in told] == [["a"], ["b"]]
    assert told[0][1] == 0


def test_one_input_does_not_wait_for_two_thousand() -> None:
    encoder = Plain()
    engine = engine_of(encoder)
    engine.submit(EmbedRequest("large", ((1,) * 60,) * 2048))
    engine.step()
    engine.submit(EmbedRequest("one", ((2,) * 3,), tenant="another"))
    before, noted = len(encoder.batches), Noted()
    while "one" not in noted.ends:
        noted.take(engine.step())
    assert len(encoder.batches) - before <= 2


# --- encoders -----------------------------------------------------------------------------------------------------


def bert_folder(folder: Path, **options: object) -> Path:
    """A random encoder of a few thousand weights."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    BertModel(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    card = Card(
        name=folder.name,
        kind=Kind.EMBEDDING,
        engine="transformers",
        max_context=128,
        vocab_size=259,
        dimensions=48,
        options=options,
    )
    write_card(folder, card)
    return folder


def reference(
    folder: Path, given: tuple[Tokens, ...], pooling: str, *, normalize: bool, kept: int
) -> list[list[float]]:
    """One by one, without padding, in the plainest words."""
    model = AutoModel.from_pretrained(folder).eval()
    found = []
    with torch.inference_mode():
        for tokens in given:
            hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            vector = (hidden.mean(dim=0) if pooling == "mean" else hidden[0])[: kept or None]
            found.append((vector / vector.norm() if normalize else vector).tolist())
    return found


def floats(vectors: list[bytes]) -> list[list[float]]:
    return [array("f", vector).tolist() for vector in vectors]


def far(found: list[list[float]], wanted: list[list[float]]) -> float:
    """The largest difference of two numbers."""
    assert [len(each) for each in found] == [len(each) for each in wanted]
    return max(abs(a - b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_the_plain_model(tmp_path: Path, pooling: str, normalize: bool) -> None:
    folder = bert_folder(tmp_path / "bert", pooling=pooling, normalize=normalize)
    engine, given = build_embedder(folder, OPTIONS), inputs(60, 128, 259, 1)
    assert isinstance(engine, EmbeddingEngine)
    engine.submit(EmbedRequest("a", given))
    engine.submit(EmbedRequest("b", given, dimensions=7))
    noted = drain(engine)
    for name, kept in (("a", 0), ("b", 7)):
        wanted = reference(folder, given, pooling, normalize=normalize, kept=kept)
        assert far(floats(noted.vectors[name]), wanted) < TOLERANCE


@pytest.mark.model
def test_the_real_model_is_that_of_the_plain_one_alone_and_in_company(minilm_dir: Path) -> None:
    engine = build_embedder(minilm_dir, OPTIONS)
    assert isinstance(engine, EmbeddingEngine)
    given = inputs(40, 200, 30_000, 2)
    engine.submit(EmbedRequest("one by one", given[:1]))
    alone = drain(engine).vectors["one by one"]
    for place, name in enumerate("abc"):
        engine.submit(EmbedRequest(name, given[place:]))
    noted = drain(engine)
    wanted = reference(minilm_dir, given, "mean", normalize=True, kept=0)
    assert far(floats(noted.vectors["a"]), wanted) < TOLERANCE
    assert far(floats(noted.vectors["c"]), wanted[2:]) < TOLERANCE
    assert far(floats(alone), wanted[:1]) < TOLERANCE


@pytest.mark.model
def test_the_real_model_knows_what_is_alike(minilm_dir: Path) -> None:
    from brokers.models import Model

    model = Model(minilm_dir)
    texts = ["A cat sits on the mat.", "A kitten is on the rug.", "The central bank raised interest rates."]
    engine = build_embedder(minilm_dir, OPTIONS)
    assert isinstance(engine, EmbeddingEngine)
    engine.submit(EmbedRequest("a", tuple(model.encode_all(texts))))
    cat, kitten, bank = map(torch.tensor, floats(drain(engine).vectors["a"]))
    assert cat @ kitten > 0.5
    assert cat @ bank < 0.2
    assert torch.stack([cat, kitten, bank]).norm(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_an_embedding_model_runs_in_a_process_as_texts_do(tmp_path: Path) -> None:
    create_scripted_embedder(tmp_path, "embedder", {"directives": True})
    listener, vectors = Listener(), Noted()

    def hear(outputs: list[Output]) -> None:
        vectors.take(outputs)
        listener.on_outputs(outputs)

    host = EngineHost(
        tmp_path / "embedder",
        OPTIONS,
        hear,
        listener.exits.put,
    )
    capabilities = host.start()
    try:
        assert (capabilities.max_context, capabilities.vocab_size) == (512, 259)
        given = inputs(300, 60, 250, 1)
        host.submit(EmbedRequest("a", given))
        host.submit(EmbedRequest("crash", (tuple(b"!crash@0"),)))
        listener.exits.get(timeout=20)
        done = len(vectors.vectors.get("a", []))
        host.start()
        host.submit(EmbedRequest("a", given, done=done))
        listener.wait_end("a")
        assert vectors.vectors["a"] == [scripted_vector(tokens) for tokens in given]
    finally:
        host.stop()
