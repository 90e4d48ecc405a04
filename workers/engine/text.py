"""Text around an engine: tokens in, tokens with their text out, and nothing shown that should not be.

The text at position n is a pure function of the first n output tokens: their decoding, less an incomplete character
at its end. A token's piece is what it adds to that. So pieces do not depend on how the tokens arrive, and a sequence
that is taken over at any position goes on where the text stood.

A token is released once its text is settled: it does not end inside a character, and no stop string can begin in
it any more. Hence at the end of every Output, what was released decodes to exactly what was shown.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypedDict

import msgspec
from tokenizers import Tokenizer

from workers.engine.protocol import Output, Request, TokenLogprobs

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 12  # tokens decoded anew with each one, at most twice this: enough context, and cheap (about 10 us)
_MAX_HELD = 4  # tokens held for one character: it has at most four bytes, so by then the bytes are no character


class TextDecoder:
    """A tokenizer's way from ids to text, and what has to be known of it to do that piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        # The ByteLevel decoder joins bytes and does no more: its text needs no context. Others strip a space at
        # the beginning, so a window must begin with something visible.
        self.context_free = kinds == {"ByteLevel"}
        # An incomplete character shows as one U+FFFD, but as one for each byte where byte tokens are a fallback.
        self._doubt = 3 if "ByteFallback" in kinds else 1

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def settled(self, text: str) -> str:
        """`text` without what further bytes may still turn into a character."""
        for _ in range(self._doubt):
            text = text.removesuffix(_UNKNOWN)
        return text


class Detokenizer:
    """The running text of one sequence, in O(window) a token."""

    def __init__(self, decoder: TextDecoder, output: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._ids = self._tail(list(output))
        self._clean = self._last_clean()  # leading ids of the window that end on a character's border
        self._clean_text = decoder.decode(self._ids[: self._clean])
        self._shown = decoder.settled(self._whole())  # the window's text, as far as it was given out

    @property
    def recent(self) -> str:
        """The last few tokens' text."""
        return self._shown

    def feed(self, token: int) -> tuple[str, bool]:
        """The token's piece, and whether the text now ends on a character's border."""
        self._ids.append(token)
        whole = self._whole()
        settled = self._decoder.settled(whole)
        piece, self._shown = settled[len(self._shown) :], settled
        clean = settled == whole
        if clean:
            self._clean, self._clean_text = len(self._ids), whole
            self._shorten()
        return piece, clean

    def _whole(self) -> str:
        whole = self._decoder.decode(self._ids)
        if whole.startswith(self._clean_text):
            return whole
        # Byte fallback turns a whole run of byte tokens into U+FFFD when its last character is incomplete.
        return self._clean_text + self._decoder.decode(self._ids[self._clean :])

    def _shorten(self) -> None:
        if len(self._ids) < 2 * _WINDOW:
            return
        ids = self._ids[-_WINDOW:]
        text = self._decoder.decode(ids)
        if not text.endswith(_UNKNOWN) and (self._decoder.context_free or text.strip()):
            self._ids, self._clean, self._clean_text, self._shown = ids, len(ids), text, text

    def _tail(self, output: list[int]) -> list[int]:
        """The shortest end of `output` that stands for all of it."""
        for length in (_WINDOW, 8 * _WINDOW):
            text = self._decoder.decode(output[-length:])
            if not text.startswith(_UNKNOWN) and self._decoder.settled(text).strip():
                return output[-length:]
        return output

    def _last_clean(self) -> int:
        for held in range(min(_MAX_HELD, len(self._ids))):
            length = len(self._ids) - held
            if not self._decoder.decode(self._ids[:length]).endswith(_UNKNOWN):
                return length
        return 0


@dataclass(slots=True, frozen=True)
class _Held:
    """A token that waits for its release."""

    token: int
    piece: str
    clean: bool  # the text up to here ends on a character's border
    logprobs: TokenLogprobs | None = None


class Released(TypedDict):
    """Of an Output."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...]


class StopStrings:
    """Where a text has to be cut. The match that is complete first counts, so it does not matter how text arrives."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self.reach = max(map(len, self._stops), default=1) - 1
        """How many characters before a piece may belong to a stop string that ends in it."""

    def find(self, text: str, new: int) -> int | None:
        """Where the stop string begins that is the first to end in the last `new` characters of `text`."""
        start = max(0, len(text) - new - self.reach)
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop, start)) >= 0]
        return min(found)[1] if found else None

    def pending(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        for length in range(min(self.reach, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextSequence:
    """Releases one sequence's tokens."""

    def __init__(self, decoder: TextDecoder, request: Request) -> None:
        self._detokenizer = Detokenizer(decoder, request.output)
        self._stops = StopStrings(request.sampling.stop)
        self._held: deque[_Held] = deque()
        # The end of what was shown, then what is held. Stop strings are looked for in both: a job may be taken over
        # between the tokens of one Output, where half of one may have been shown.
        self._text = self._detokenizer.recent
        self._shown = len(self._text)

    def feed(self, output: Output) -> Output:
        """The same Output with the tokens that may be shown now; it ends with "stop" where a stop string begins."""
        for token, logprobs in zip_longest(output.tokens, output.logprobs):
            piece, clean = self._detokenizer.feed(token)
            self._held.append(_Held(token, piece, clean, logprobs))
            self._text += piece
            cut = self._stops.find(self._text, len(piece))
            if cut is not None:
                return self._stop(output.seq, cut - self._shown)
        count = self._settled() if output.finish is None else len(self._held)
        return msgspec.structs.replace(output, **self._release(count))

    def _settled(self) -> int:
        """How many of the held tokens may go."""
        safe = len(self._text) - self._stops.pending(self._text)
        end = self._shown
        count = 0
        for index, held in enumerate(self._held, start=1):
            end += len(held.piece)
            if end > safe:
                break
            if held.clean or index - count > _MAX_HELD:
                count = index
        return count

    def _stop(self, seq: str, cut: int) -> Output:
        """Release what stands before the cut; the token in which it falls goes with the part before it."""
        count = end = 0
        for index, held in enumerate(self._held):
            if end + len(held.piece) > cut:
                if end < cut:
                    self._held[index] = replace(held, piece=held.piece[: cut - end], clean=True)
                    count = index + 1
                break
            end += len(held.piece)
            count = index + 1 if held.clean or held.piece else count  # all text before the cut is shown
        return Output(seq, **self._release(count), finish="stop")

    def _release(self, count: int) -> Released:
        released = [self._held.popleft() for _ in range(count)]
        pieces = tuple(held.piece for held in released)
        self._shown += sum(map(len, pieces))
        done = max(0, self._shown - self._stops.reach)
        self._text, self._shown = self._text[done:], self._shown - done
        logprobs = tuple(held.logprobs for held in released if held.logprobs)
        return {"tokens": tuple(held.token for held in released), "pieces": pieces, "logprobs": logprobs}


class TextStage:
    """All sequences of an engine: raw Outputs in, released ones out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = TextDecoder(tokenizer)
        # Without a token yet, in the order in which they came; the engine may still refuse them. Of one id there may be
        # several: what was aborted and then asked for again is told of as "cancelled" first.
        self._requests: defaultdict[str, list[Request]] = defaultdict(list)
        self._sequences: dict[str, TextSequence] = {}
        self._stopped: set[str] = set()  # ended here; the engine's "cancelled" is still to come

    def open(self, request: Request) -> None:
        self._requests[request.seq].append(request)

    def feed(self, raw: list[Output]) -> tuple[list[Output], list[str]]:
        """What may be shown, and the sequences that ended here and that the caller must abort in the engine."""
        released: list[Output] = []
        stopped: list[str] = []
        for output in raw:
            if output.seq in self._stopped:
                self._stopped.discard(output.seq)
                continue
            shown = self._feed(output)
            if shown.finish == "stop" and output.finish is None:
                stopped.append(shown.seq)
            if shown.tokens or shown.finish:
                released.append(shown)
        self._stopped.update(stopped)
        return released, stopped

    def _feed(self, output: Output) -> Output:
        if output.error_code == "duplicate_sequence":
            self._take(output.seq, behind=output.seq not in self._sequences)
            return output  # it is not about the live sequence of that id, but about who came behind it
        sequence = self._sequences.get(output.seq)
        if sequence is None:
            request = self._take(output.seq)
            if not output.tokens:
                return output  # it ended without a token: refused, or cancelled in the queue
            sequence = self._sequences[output.seq] = TextSequence(self._decoder, request)
        shown = sequence.feed(output)
        if shown.finish is not None:
            del self._sequences[output.seq]
        return shown

    def _take(self, seq: str, *, behind: bool = False) -> Request:
        """The first request of an id, or the one behind it."""
        requests = self._requests[seq]
        request = requests.pop(behind)
        if not requests:
            del self._requests[seq]
        return request


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": "None"}
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {part["type"] for part in parts}
