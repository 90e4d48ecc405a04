"""How a stream entry is written and read. Fields are plain, so that a client in any language can XREAD them.

    content  id <pos>-0   p start position, h digest, ts unix ms, and of a text
                          t text, i token ids (little-endian uint32 each), o end offset of each token's text within t
                          (uint32 each, in code points), l logprobs where asked for (below); of embeddings
                          v vectors, one behind the other (little-endian float32)
    control  id <pos>-n   k kind, d JSON object, ts unix ms

The digest is the first 16 hex digits of the SHA-256 of the stream's text from its start, in UTF-8: chunk borders
do not show in it. Vectors have none: one that is made again is the same but for rounding.

Logprobs are, for each token, its log probability (float32) and then the k best tokens, best first: id (uint32) and log
probability (float32), little-endian. k is the same for all tokens of an entry; the field's length tells it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec

from brokers.job import Content, Control, Entry, Scored


class Digest:
    """The running digest of a stream's text."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, text: str) -> None:
        self._hash.update(text.encode())

    def hex(self) -> str:
        return self._hash.hexdigest()[:16]


def fields(
    token_ids: Sequence[int], pieces: Sequence[str], digest: str, logprobs: Sequence[bytes] = ()
) -> tuple[str | bytes, ...]:
    """One content entry of a text, as the append function takes it; `logprobs` as `packed_logprobs` makes them."""
    offsets = tuple(accumulate(map(len, pieces)))
    text = (digest, "t", "".join(pieces), "i", _packed(token_ids), "o", _packed(offsets))
    # All of a length, or none: a worker of the version before may have written a part of the text without them.
    return (*text, "l", b"".join(logprobs)) if logprobs and len(set(map(len, logprobs))) == 1 and logprobs[0] else text


def packed_logprobs(logprob: float, top: Sequence[tuple[int, float]]) -> bytes:
    """Of one token."""
    return struct.pack("<f" + "If" * len(top), logprob, *chain.from_iterable(top))


def vector_fields(vectors: Sequence[bytes]) -> tuple[str | bytes, ...]:
    """One content entry of embeddings, likewise."""
    return "", "v", b"".join(vectors)


Row = tuple[bytes, Mapping[bytes, bytes]]
"""An entry's id and fields, as a server gives them."""


def rows(reply: Any) -> list[Row]:
    """The rows in a reply of XRANGE and its kin, whether redis-py has put each one's fields into a dict or not."""
    return [
        (entry_id, raw if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True)))
        for entry_id, raw in reply
    ]


def parse(entry_id: bytes, raw: Mapping[bytes, bytes]) -> Entry:
    pos, n = (int(part) for part in entry_id.split(b"-"))
    ts_ms = int(raw[b"ts"])
    if n:
        return Control(pos=pos, n=n, kind=raw[b"k"].decode(), data=msgspec.json.decode(raw[b"d"]), ts_ms=ts_ms)
    return Content(
        start=int(raw[b"p"]),
        pos=pos,
        text=raw.get(b"t", b"").decode(),
        token_ids=_unpacked(raw.get(b"i", b"")),
        offsets=_unpacked(raw.get(b"o", b"")),
        logprobs=raw.get(b"l", b""),
        vectors=raw.get(b"v", b""),
        digest=raw[b"h"].decode(),
        ts_ms=ts_ms,
    )


def cut(content: Content, after: int) -> Content:
    """What of an entry lies beyond position `after`, which is within it."""
    skip = after - content.start
    if skip <= 0:
        return content
    if content.vectors:
        return msgspec.structs.replace(content, start=after, vectors=content.vectors[skip * width(content) :])
    each = len(content.logprobs) // (content.pos - content.start)
    head = content.offsets[skip - 1]
    return msgspec.structs.replace(
        content,
        start=after,
        text=content.text[head:],
        token_ids=content.token_ids[skip:],
        offsets=tuple(offset - head for offset in content.offsets[skip:]),
        logprobs=content.logprobs[skip * each :],
    )


def width(content: Content) -> int:
    """Bytes of one vector of an entry that has vectors."""
    return len(content.vectors) // (content.pos - content.start)


def split(content: Content) -> list[bytes]:
    """The vectors of an entry, one each."""
    return _split(content.vectors, content)


def split_logprobs(content: Content) -> list[bytes]:
    """The packed logprobs of an entry, one for each token, or none."""
    return _split(content.logprobs, content)


def scored(content: Content) -> list[Scored]:
    """The logprobs of an entry, one for each token, or none."""
    return [_scored(struct.unpack(f"<f{'If' * (len(packed) // 8)}", packed)) for packed in split_logprobs(content)]


def head(content: Content, upto: int) -> str:
    """The text of an entry up to position `upto`, which is within it."""
    return content.text[: content.offsets[upto - content.start - 1]] if upto > content.start else ""


def _scored(numbers: tuple[Any, ...]) -> Scored:
    return Scored(numbers[0], tuple(zip(numbers[1::2], numbers[2::2], strict=True)))


def _split(packed: bytes, content: Content) -> list[bytes]:
    each = len(packed) // (content.pos - content.start)
    return [packed[at : at + each] for at in range(0, len(packed), each)] if each else []


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)
