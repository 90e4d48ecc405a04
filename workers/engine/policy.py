"""Who is next, and who must go for it: lanes, tenants, deadlines. No tensors, no clock: it decides on what it is given.

Lanes are served by rank. So that none starves, a waiting lane gathers credit while others are served, and at a whole
one it is next, and stays: under any load the standard lane gets one admission for 8 of others, and the batch lane one
for 16. Within a lane the tenant is next that has the fewest sequences running for its weight, and of its sequences the
one whose deadline comes first.

A sequence for which there is no room may send others back to the queue: of lower lanes only, of the lowest first and
there the newest, and never below the share of slots that is a lane's floor.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence as Rows

from workers.engine.sequence import Sequence

_SHARES = {0: 0.0, 1: 1 / 8}
_LEAST_SHARE = 1 / 16


def _share(lane: int) -> float:
    return _SHARES.get(lane, _LEAST_SHARE)


class Policy:
    """Of one engine with `slots` rows."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._credit: defaultdict[int, float] = defaultdict(float)  # by lane

    def next(self, waiting: Rows[Sequence], running: Rows[Sequence]) -> Sequence | None:
        """Which of the waiting is to be admitted now, or as soon as there is room."""
        if not waiting:
            return None
        lane = self._next_lane({sequence.lane for sequence in waiting})
        load = Counter(sequence.request.tenant for sequence in running)

        def order(sequence: Sequence) -> tuple[float, float, int]:
            request = sequence.request
            return load[request.tenant] / request.weight, request.deadline or math.inf, sequence.arrival

        return min((sequence for sequence in waiting if sequence.lane == lane), key=order)

    def admitted(self, sequence: Sequence, waiting: Rows[Sequence]) -> None:
        """It was; `waiting` are those that still are not."""
        sequence.stays = self._credit[sequence.lane] >= 1
        self._credit[sequence.lane] = max(0.0, self._credit[sequence.lane] - 1)
        for lane in {other.lane for other in waiting} - {sequence.lane}:
            self._credit[lane] += _share(lane)

    def victims(self, sequence: Sequence, running: Rows[Sequence]) -> list[Sequence]:
        """Which of the running may go for it, in this order."""
        count = Counter(other.lane for other in running)
        going = []
        for other in sorted(running, key=lambda other: (-other.lane, -other.arrival)):
            lower = other.lane > sequence.lane
            if lower and not other.stays and count[other.lane] > self._floor(other.lane):
                count[other.lane] -= 1
                going.append(other)
        return going

    def _next_lane(self, lanes: set[int]) -> int:
        due = [lane for lane in lanes if self._credit[lane] >= 1]
        return max(due) if due else min(lanes)

    def _floor(self, lane: int) -> int:
        return int(self._slots * _share(lane))
