"""Each fault comes in two sizes: seconds with `make test`, the promised numbers with `make faults`."""

from __future__ import annotations

import pytest

_LONGEST_S = 3600


def sizes(short: int, long: int, name: str = "times") -> pytest.MarkDecorator:
    """Parametrize a test with how often its fault happens."""
    big = pytest.param(long, id="long", marks=[pytest.mark.faults, pytest.mark.timeout(_LONGEST_S)])
    return pytest.mark.parametrize(name, [pytest.param(short, id="short"), big])
