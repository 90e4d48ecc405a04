"""What a job asks for reaches the engine field by field."""

from __future__ import annotations

import msgspec

from brokers.job import Sampling
from workers.engine.protocol import SamplingParams


def test_the_engine_knows_each_field_of_a_jobs_sampling_by_the_same_name_and_default() -> None:
    assert msgspec.structs.asdict(SamplingParams()) == msgspec.structs.asdict(Sampling())
