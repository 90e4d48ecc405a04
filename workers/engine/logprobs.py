"""Log probabilities of drawn tokens, for the rows of a batch that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from torch import Tensor

from workers.engine.protocol import TokenLogprobs
from workers.engine.sequence import Sequence


class Logprobs:
    """Made before sampling changes the logits [rows, vocabulary]; rows that ask for nothing cost nothing."""

    def __init__(self, logits: Tensor, rows: Rows[Sequence]) -> None:
        asked = [(index, top) for index, row in enumerate(rows) if (top := row.request.sampling.logprobs) is not None]
        self._places = {index: place for place, (index, _) in enumerate(asked)}
        self._tops = [top for _, top in asked]
        if asked:
            self._scores = logits[list(self._places)].float().log_softmax(dim=-1)
            best = self._scores.topk(min(max(self._tops), self._scores.shape[-1]), dim=-1)
            self._best = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def of(self, index: int, token: int) -> TokenLogprobs | None:
        """What row `index` gave to the token that was drawn; None where it does not ask."""
        place = self._places.get(index)
        if place is None:
            return None
        top = self._tops[place]
        tokens, scores = self._best[place]
        return TokenLogprobs(float(self._scores[place, token]), tuple(zip(tokens[:top], scores[:top], strict=True)))
