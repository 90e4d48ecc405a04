"""From a request's fields to the job's sampling, checked against its model."""

from __future__ import annotations

from brokers.job import Sampling
from brokers.models import Model
from producers import guides
from producers.bodies import check_text
from producers.platform import Platform
from producers.problems import Problem
from producers.prompts import check_known
from producers.schemas import SamplingFields

_WORKED_OUT = frozenset({"seed", "stop", "stop_token_ids", "response_format"})
_PLAIN = tuple(name for name in SamplingFields.__struct_fields__ if name not in _WORKED_OUT)


async def sampling(platform: Platform, model: Model, fields: SamplingFields, seed: int) -> Sampling:
    """All of it but `max_tokens`; what was not given, or given as null, takes its default. `seed` stands in for none.

    Raises Problem.
    """
    check_known(model, fields.logit_bias or (), "logit_bias")
    check_known(model, fields.stop_token_ids or (), "stop_token_ids")
    named = {name: getattr(fields, name) for name in _PLAIN}
    return Sampling(
        seed=seed if fields.seed is None else fields.seed,
        stop=_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logprobs=fields.alternatives,
        json_schema=await _json_schema(platform, fields),
        **{name: value for name, value in named.items() if value is not None},
    )


async def _json_schema(platform: Platform, fields: SamplingFields) -> str | None:
    schema = await guides.schema_of(platform.schemas, fields.response_format)
    if schema is not None and fields.ignore_eos:
        raise Problem(
            "invalid_parameter", "ignore_eos does not go with a response_format, which ends", param="ignore_eos"
        )
    return schema


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        check_text(text, "stop")
    return stops
