"""Log probabilities of tokens, from a stream's packed field to words."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from brokers import entries
from brokers.job import Content, Scored
from brokers.spelling import Spelling
from brokers.views import Alternative, TokenLogprob

_LEAST = -9999.0  # stands for nothing at all, which JSON has no number for; OpenAI's choice


class Score(NamedTuple):
    """One token of a text."""

    token_id: int
    offset: int  # where its text begins, in code points of the whole text
    scored: Scored


def scores(content: Content, before: int) -> list[Score]:
    """Of an entry's tokens, with `before` code points of text before it; none where none were asked for."""
    if not content.logprobs:
        return []
    starts = (0, *content.offsets[:-1])
    found = zip(content.token_ids, starts, entries.scored(content), strict=True)
    return [Score(token_id, before + start, scored) for token_id, start, scored in found]


def worded(found: list[Score], spelling: Spelling, *, with_ids: bool = False) -> list[TokenLogprob]:
    """As JSON shows them."""

    def alternative(token_id: int, logprob: float) -> Alternative:
        spelled = spelling.of(token_id)
        shown = token_id if with_ids else UNSET
        return Alternative(token_id=shown, token=text_of(spelled), logprob=finite(logprob), bytes=list(spelled))

    return [
        TokenLogprob(
            **msgspec.structs.asdict(alternative(score.token_id, score.scored.logprob)),
            top_logprobs=[alternative(*best) for best in score.scored.top],
        )
        for score in found
    ]


def text_of(spelled: bytes) -> str:
    """Bytes that are no whole character are escaped, as OpenAI does it."""
    return spelled.decode(errors="backslashreplace")


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)
