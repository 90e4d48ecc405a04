"""Drives an engine by hand."""

from __future__ import annotations

from workers.engine.protocol import Engine, Output, Request, SamplingParams, TokenLogprobs

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def prompt(text: str) -> tuple[int, ...]:
    """Token ids of the byte-level test tokenizer, in which a byte is its own id."""
    return tuple(text.encode())


def ask(seq: str, text: str = "the sea", sampling: SamplingParams = GREEDY, **changes: object) -> Request:
    return Request(seq, prompt(text), sampling=sampling, **changes)  # type: ignore[arg-type]


class Record:
    """What came of each sequence."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.order: list[str] = []  # sequences by their first token

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.seq not in self.ends, "nothing follows the last Output of a sequence"
            if output.tokens and output.seq not in self.tokens:
                self.order.append(output.seq)
            self.tokens.setdefault(output.seq, []).extend(output.tokens)
            self.logprobs.setdefault(output.seq, []).extend(output.logprobs)
            if output.finish:
                self.ends[output.seq] = output

    def finish(self, seq: str) -> str | None:
        return self.ends[seq].finish


def run(engine: Engine, *requests: Request, limit: int = 2000) -> Record:
    """Submit, and step until the engine is idle."""
    record = Record()
    for request in requests:
        engine.submit(request)
    return drain(engine, record, limit)


def drain(engine: Engine, record: Record, limit: int = 2000) -> Record:
    for _ in range(limit):
        if engine.idle:
            return record
        record.take(engine.step())
    raise AssertionError("the engine does not come to rest")


def step_until(engine: Engine, record: Record, seq: str, count: int) -> int:
    """Step until `seq` has `count` tokens; how many steps it took."""
    for steps in range(2000):
        if len(record.tokens.get(seq, [])) >= count:
            return steps
        record.take(engine.step())
    raise AssertionError(f"{seq} does not come to {count} tokens")
