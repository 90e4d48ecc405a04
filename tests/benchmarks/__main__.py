"""Every figure the docs carry, from one run.  `make bench`, or python -m tests.benchmarks [--write docs/benchmarks.md]

Run it on a quiet machine: nothing else should use its cores.
"""

from __future__ import annotations

import argparse
import base64
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from brokers import settings as settings_module
from brokers.settings import Settings
from compose import config
from compose.servers import PortBook, RabbitMQ, Valkey
from tests.benchmarks import embeddings, first_token, submissions, throughput
from tests.benchmarks.report import Row, machine, table
from tests.platform import SCRIPTED_MODEL, Platform
from workers.weights.scripted import create_scripted_model

REGION = "local"
REAL_MODEL = "smollm2-135m-instruct"
_HEAD = """# Benchmarks

Made by `make bench` ({machine}). Each row's reference was measured in the same run, in turns; read the ratios.

"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("--write", type=Path, help="write the table into this file")
    parser.add_argument("--models", type=Path, default=Path(".lingbot/models"), help="folder with the real model")
    parser.add_argument("--only", choices=["submissions", "first-token", "throughput", "embeddings"])
    options = parser.parse_args()
    rows = measure(options.models.resolve(), options.only)
    text = _HEAD.format(machine=machine()) + table(rows)
    print(text)
    if options.write:
        options.write.write_text(text)


def measure(models: Path, only: str | None) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lingbot-bench-") as folder:
        state = Path(folder)
        ports = PortBook()
        with servers(state, ports, models) as settings:
            if only in {None, "first-token"}:
                with running(Platform(state, settings)) as platform:
                    rows += first_token.run(platform)
            if only in {None, "submissions"}:
                with running(Platform(state, settings)) as platform:
                    rows += submissions.run(platform, ports.take("usual-way"), state)
            if only in {None, "throughput"}:
                with running(Platform(state, settings, model=REAL_MODEL)) as platform:
                    rows += throughput.run(platform, REAL_MODEL)
    if only in {None, "embeddings"}:
        rows += embeddings.run(models)
    return rows


@contextmanager
def servers(state: Path, ports: PortBook, models: Path) -> Iterator[Settings]:
    """Private servers and the settings of a one-region platform on them."""
    with ExitStack() as stack:
        rabbitmq = stack.enter_context(RabbitMQ(state / "rabbitmq", regions=[REGION], ports=ports))
        valkey = stack.enter_context(Valkey(state / "valkey", ports=ports))
        origin = state / "models"
        create_scripted_model(origin, SCRIPTED_MODEL)
        if (models / REAL_MODEL).is_dir():
            (origin / REAL_MODEL).symlink_to(models / REAL_MODEL)
        region = {"amqp": rabbitmq.url(REGION), "redis": valkey.url, "management": rabbitmq.management_url}
        wanted = {
            "region": REGION,
            "regions": {REGION: region},
            "models_dir": origin,
            "runtime_dir": state / "run",
            "seal_keys": {"bench": base64.b64encode(secrets.token_bytes(32)).decode()},
            "port": ports.take("api"),
            "queue_max_length": 10_000_000,
            "log_level": "WARNING",
        }
        (state / "lingbot.toml").write_text(config.to_toml(wanted))
        os.environ["LINGBOT_CONFIG"] = str(state / "lingbot.toml")
        settings_module.load.cache_clear()
        yield settings_module.load()


@contextmanager
def running(platform: Platform) -> Iterator[Platform]:
    try:
        platform.start()
        yield platform
    finally:
        platform.stop()


if __name__ == "__main__":
    main()
