"""`lingbot worker`: chooses queues and settings, then becomes a plain Celery worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from brokers import settings as settings_module
from brokers.errors import ConfigurationError
from brokers.job import Lane
from brokers.models import Registry
from compose import commands


class Choice(NamedTuple):
    """What the options of `lingbot worker` chose; None leaves the setting as it is."""

    models: Sequence[str] = ()  # all when empty
    lanes: Sequence[str] = ()  # all when empty
    name: str = "worker"
    region: str | None = None
    slots: int | None = None
    device: str | None = None
    engine: str | None = None


def become_worker(choice: Choice, extra: Sequence[str]) -> NoReturn:
    """Replace this process by the worker; `extra` goes to Celery. Raises ConfigurationError."""
    command, environment = plan(choice)
    os.execve(command[0], [*command, *extra], environment)


def plan(choice: Choice) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the worker. Raises ConfigurationError on an unknown model or lane."""
    chosen = {"region": choice.region, "slots": choice.slots, "device": choice.device, "engine": choice.engine}
    given = {key: value for key, value in chosen.items() if value is not None}
    settings = settings_module.read(**given)
    lanes = _lanes(choice.lanes)
    models = _models(choice.models, [model.card.name for model in Registry(settings.models_dir).all()])
    environment = dict(os.environ) | {f"LINGBOT_{key.upper()}": str(value) for key, value in given.items()}
    return commands.worker(settings, models, name=choice.name, lanes=lanes), environment


def _models(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    if unknown := sorted(set(wanted) - set(known)):
        raise ConfigurationError(
            f"no such model: {', '.join(unknown)}", hint=f"The origin holds: {', '.join(known) or 'none'}."
        )
    if not known:
        raise ConfigurationError("the origin holds no model", hint="lingbot models import PATH")
    return list(wanted or known)


def _lanes(wanted: Sequence[str]) -> list[Lane]:
    try:
        return [Lane(lane) for lane in wanted] or list(Lane)
    except ValueError as error:
        raise ConfigurationError(str(error), hint=f"The lanes are {', '.join(Lane)}.") from None
