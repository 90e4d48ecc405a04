"""What must hold of every acknowledged job, whatever died meanwhile. It believes nobody: not the API's view of a job,
not the worker's log, only the store's entries, what clients were sent, and the model itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from tokenizers import Tokenizer

from brokers import calls, connect, entries, names
from brokers.job import Content, Control, Entry, Job, State
from brokers.models import Model, Registry
from brokers.settings import Settings
from tests.faults.load import Reading, Work
from workers.engine.protocol import Request, SamplingParams
from workers.engine.scripted import Options, ScriptedModel
from workers.engine.sequence import Sequence as EngineSequence

_ENDED_WITHIN_S = 30.0
_SETTLED_WITHIN_S = 20.0


class Stream(NamedTuple):
    """A job's record and its whole stream, from the store."""

    job: Job
    entries: list[Entry]

    @property
    def content(self) -> list[Content]:
        return [entry for entry in self.entries if isinstance(entry, Content)]

    @property
    def text(self) -> str:
        return "".join(content.text for content in self.content)

    @property
    def token_ids(self) -> list[int]:
        return [token for content in self.content for token in content.token_ids]

    def controls(self, kind: str) -> list[Control]:
        return [entry for entry in self.entries if isinstance(entry, Control) and entry.kind == kind]


class Verdict(NamedTuple):
    """What was checked and found right."""

    jobs: int
    tokens: int
    taken_over: int
    attempts: int  # the most that one job took


class Checker:
    """Checks the jobs of one tenant, which nobody else uses."""

    def __init__(self, settings: Settings, tenant: str) -> None:
        self._settings = settings
        self.tenant = tenant
        self._client = connect.blocking(settings, settings.region, timeout_s=10.0)
        self._registry = Registry(settings.models_dir)
        self._began = time.time()

    def close(self) -> None:
        self._client.close()

    def check(self, readings: Sequence[Reading], *, state: State = State.SUCCEEDED) -> Verdict:
        """Raises AssertionError that names what is wrong with which job."""
        streams = self._ended([reading.job_id for reading in readings])
        faults = [
            f"{reading.job_id}: {fault}"
            for reading in readings
            if (stream := streams.get(reading.job_id))
            for fault in _delivery_faults(reading, stream)
        ]
        return self._verdict({reading.job_id: reading.work for reading in readings}, streams, state, faults)

    def check_jobs(self, works: Mapping[str, Work], *, state: State = State.SUCCEEDED) -> Verdict:
        """As `check`, of jobs that no client read."""
        return self._verdict(works, self._ended(works), state, [])

    def _verdict(
        self, works: Mapping[str, Work], streams: Mapping[str, Stream], state: State, faults: list[str]
    ) -> Verdict:
        for job_id, work in works.items():
            faults += [f"{job_id}: {fault}" for fault in self._faults(work, streams.get(job_id), state)]
        faults += self._usage_faults()
        assert not faults, f"{len(faults)} faults in {len(works)} jobs:\n" + "\n".join(faults[:20])
        whole = list(streams.values())
        return Verdict(
            jobs=len(whole),
            tokens=sum(stream.job.pos for stream in whole),
            taken_over=sum(len(stream.controls("taken_over")) for stream in whole),
            attempts=max((stream.job.attempt for stream in whole), default=0),
        )

    def stream(self, job_id: str) -> Stream | None:
        """What the store has of a job now."""
        part = names.partition(job_id, self._settings.partitions)
        job = connect.send(self._client, calls.fetch(names.record(self._settings.region, part, job_id)))
        if job is None:
            return None
        raw = connect.send(self._client, calls.entries_of(calls.keys(job, self._settings.partitions)))
        return Stream(job, [entries.parse(entry_id, fields) for entry_id, fields in raw])

    def _ended(self, job_ids: Iterable[str]) -> dict[str, Stream]:
        """Each job's stream once it has ended, or what there is of it in the end; lost ones are missing."""
        deadline = time.monotonic() + _ENDED_WITHIN_S
        found: dict[str, Stream] = {}
        for job_id in job_ids:
            while not ((stream := self.stream(job_id)) and stream.job.ended) and time.monotonic() < deadline:
                time.sleep(0.1)
            if stream:
                found[job_id] = stream
        return found

    # --- one job ----------------------------------------------------------------------------------------------

    def _faults(self, work: Work, stream: Stream | None, state: State) -> list[str]:
        if stream is None:
            return ["lost: the store has no record of it"]
        found = stream_faults(stream)
        if stream.job.state is not state:
            found.append(f"its state is {stream.job.state}, not {state}: {stream.job.failure}")
        return found + self._text_faults(work, stream)

    def _text_faults(self, work: Work, stream: Stream) -> list[str]:
        model = self._registry.get(work.model)
        if model.card.engine != "scripted":
            return []  # see scoring.py
        wanted = reference(model, work)
        if stream.job.state is State.SUCCEEDED and stream.text != wanted:
            return [f"its text is not the reference's: {_first_difference(stream.text, wanted)}"]
        if not wanted.startswith(stream.text):
            return [f"its text is no beginning of the reference: {_first_difference(stream.text, wanted)}"]
        return []

    # --- accounting -------------------------------------------------------------------------------------------

    def _usage_faults(self) -> list[str]:
        """Every job of the tenant that ran is on its account, and on it once. The reconciler settles with time."""
        deadline = time.monotonic() + _SETTLED_WITHIN_S
        while True:
            wanted, counted = self._owed(), self._counted()
            if wanted == counted:
                return []
            if time.monotonic() > deadline:
                return [f"the tenant's usage is {dict(counted)}, and the sum over its jobs {dict(wanted)}"]
            time.sleep(0.2)

    def _owed(self) -> Counter[str]:
        owed: Counter[str] = Counter()
        for job in self.jobs():
            if job.usage is not None:
                owed["jobs"] += 1
                owed[job.state.value] += 1
                owed["prompt_tokens"] += job.usage.prompt_tokens
                owed["completion_tokens"] += job.usage.completion_tokens
        return owed

    def jobs(self) -> Iterable[Job]:
        """Every job of the tenant that the store knows."""
        region, parts = self._settings.region, range(self._settings.partitions)
        for part in map(names.partition_at, parts):
            index = names.tenant_jobs(region, part, self.tenant)
            for job_id in connect.send(self._client, calls.Call(("ZRANGE", index, 0, -1), list)):
                job = connect.send(self._client, calls.fetch(names.record(region, part, job_id.decode())))
                if job:
                    yield job

    def _counted(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for day in {datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d") for moment in (self._began, time.time())}:
            usage = names.usage(self._settings.region, self.tenant, day)
            found = connect.send(self._client, calls.Call(("HGETALL", usage), dict))
            counted.update({name.decode(): int(count) for name, count in found.items()})
        return Counter({name: count for name, count in counted.items() if count})


def stream_faults(stream: Stream) -> list[str]:
    """A stream against itself: contiguous by its own positions, whole by its own digests, ended once."""
    found: list[str] = []
    pos, digest = 0, entries.Digest()
    for content in stream.content:
        if content.start != pos:
            found.append(f"content starts at {content.start} where {pos} was the last position")
        pos = content.pos
        digest.update(content.text)
        if content.digest != digest.hex():
            found.append(f"the digest at {pos} is not that of the text up to there")
        if not len(content.token_ids) == len(content.offsets) == content.pos - content.start:
            found.append(f"the entry at {pos} has {len(content.token_ids)} tokens for {content.pos - content.start}")
        if content.offsets and content.offsets[-1] != len(content.text):
            found.append(f"the offsets of the entry at {pos} do not cover its text")
    found += _end_faults(stream, pos, digest.hex() if pos else "")
    return found


def _end_faults(stream: Stream, pos: int, digest: str) -> list[str]:
    ends = stream.controls("end")
    if len(ends) != 1:
        return [f"it has {len(ends)} terminal entries"]
    end, job = ends[0], stream.job
    found = []
    if stream.entries[-1] is not end:
        found.append("its terminal entry is not its last")
    if end.data["status"] != job.state.value:
        found.append(f"its end says {end.data['status']} and its record {job.state}")
    if end.data["digest"] != digest:
        found.append("the digest of its end is not that of its text")
    if not end.data["usage"]["completion_tokens"] == job.pos == pos:
        found.append(f"its end counts {end.data['usage']}, its record {job.pos}, its stream {pos}")
    return found


def _delivery_faults(reading: Reading, stream: Stream) -> list[str]:
    """What the client was sent, appended in the order it came, is the stream."""
    found = []
    positions = [heard.pos for heard in reading.heard if heard.event == "token"]
    if any(later <= earlier for earlier, later in pairwise(positions)):
        found.append(f"its client was sent positions again: {positions}")
    if not reading.ended:
        found.append("its client never heard its end")
    elif sum(heard.event == "end" for heard in reading.heard) != 1:
        found.append("its client heard its end more than once")
    if reading.text != stream.text:
        found.append(f"its client has another text: {_first_difference(reading.text, stream.text)}")
    return found


def _first_difference(found: str, wanted: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    near = slice(max(0, at - 10), at + 20)
    return f"at character {at}: {found[near]!r} for {wanted[near]!r} (lengths {len(found)} and {len(wanted)})"


# --- the reference --------------------------------------------------------------------------------------------


def reference(model: Model, work: Work) -> str:
    """What an uninterrupted run of the scripted engine says. `max_tokens` is a multiple of 8, so that it ends with a
    whole phrase."""
    return _scripted_text(model, model.encode(work.prompt), work.seed, work.max_tokens)


@cache
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def _scripted_text(model: Model, prompt: tuple[int, ...], seed: int, max_tokens: int) -> str:
    tokenizer = _tokenizer(str(model.folder / "tokenizer.json"))
    scripted = ScriptedModel(tokenizer, max_context=8192, eos_id=None, options=Options())
    request = Request(seq="reference", prompt=prompt, sampling=SamplingParams(seed=seed, max_tokens=max_tokens))
    script = scripted._read(EngineSequence(request, arrival=0, need=0))
    return bytes(map(script.byte, range(max_tokens))).decode()
