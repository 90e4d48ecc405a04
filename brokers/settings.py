"""The one reader of the environment and of lingbot.toml.

Every process reads its settings once, at start, through `load()`. `LINGBOT_CONFIG` names the file (default:
./lingbot.toml, then .lingbot/lingbot.toml); an environment variable `LINGBOT_<NAME>` wins over it, nested ones
with a double underscore. A bad setting stops the start and is named, never shown: it may be a secret.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from brokers.errors import ConfigurationError
from brokers.job import WORD, Lane

_FILES = (Path("lingbot.toml"), Path(".lingbot/lingbot.toml"))


class Region(BaseModel):
    """How to reach one region."""

    model_config = ConfigDict(extra="forbid")

    amqp: SecretStr  # amqp://user:password@host:port/vhost
    redis: SecretStr  # redis://user:password@host:port/0
    management: SecretStr | None = None  # http://user:password@host:port, for status and Flower


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="LINGBOT_", env_nested_delimiter="__", extra="forbid", hide_input_in_errors=True
    )

    # Where we are
    region: str = "local"
    regions: dict[str, Region] = {}
    models_dir: Path = Path(".lingbot/models")  # the origin: one folder a model
    runtime_dir: Path = Path(".lingbot/run")  # sockets and pid files
    seal_keys: dict[str, SecretStr] = {}  # key id -> 32 bytes in base64; the last one seals, all open
    partitions: Annotated[int, Field(ge=1, le=100)] = 64  # of the store; fixed at the first start

    # The API
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    max_embedding_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20  # many inputs in one request
    max_prompt_chars: Annotated[int, Field(ge=1)] = 1 << 18  # checked before tokenizing, which costs time per char
    publish_timeout_s: Annotated[float, Field(gt=0, le=1.5)] = 1.2  # a 503 is owed within 1.5 s
    store_timeout_s: Annotated[float, Field(gt=0)] = 1.2  # likewise
    publish_window: Annotated[int, Field(ge=1)] = 256  # unconfirmed messages in flight; more gains nothing (measured)
    wait_max_s: Annotated[float, Field(gt=0)] = 60.0  # Prefer: wait=N at most
    heartbeat_s: Annotated[float, Field(gt=0)] = 15.0  # an SSE comment when nothing else is sent
    rebuild_grace_s: Annotated[float, Field(ge=0)] = 10.0  # a stream that the store lost is waited for this long
    reader_grace_s: Annotated[float, Field(ge=0)] = 5.0  # OpenAI routes cancel a job whose reader is gone this long

    # Jobs
    retention_s: Annotated[int, Field(ge=60)] = 24 * 3600  # record and stream outlive the job's last change by this
    # Deadline of a job that names none, from its start; a lane not named here has default_expires_s.
    lane_expires_s: dict[Lane, Annotated[int, Field(ge=1)]] = {Lane.INTERACTIVE: 600, Lane.BATCH: 6 * 3600}
    default_expires_s: Annotated[int, Field(ge=1)] = 3600
    max_expires_s: Annotated[int, Field(ge=1)] = 6 * 3600
    max_delay_s: Annotated[int, Field(ge=0)] = 7 * 24 * 3600  # how far ahead start_at may lie
    usage_kept_s: Annotated[int, Field(ge=3600)] = 90 * 24 * 3600  # tenants' usage by day
    queue_max_length: Annotated[int, Field(ge=1)] = 100_000  # the last dam: RabbitMQ rejects the publish above it

    # Workers
    slots: Annotated[int, Field(ge=1)] = 16  # sequences in one engine's batch
    kv_tokens: Annotated[int, Field(ge=256)] = 32_768  # KV budget of one engine, in tokens over all its sequences
    prefix_tokens: Annotated[int, Field(ge=0)] = 8192  # beside it: beginnings kept for who begins likewise; 0 is off
    # What was computed of a paused sequence is held so long, in at most half of prefix_tokens: enough for a reader who
    # lags; one who stays away longer costs some computing when he is back.
    pause_grace_s: Annotated[float, Field(ge=0)] = 10.0
    speculation: bool = True  # guess tokens that repeat what a sequence said before, where that makes it faster
    threads: Annotated[int, Field(ge=0)] = 0  # torch threads; 0 counts the cores this process may use
    engine: Literal["", "transformers", "vllm"] = ""  # instead of the one that each model's card names
    device: str = "cpu"
    # auto is bfloat16 on a GPU; on a CPU float32, or bfloat16 where that is faster and `exact` is off
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    exact: bool = True  # where the engine can: the same text alone, batched, resumed and taken over, to the bit
    lease_ms: Annotated[int, Field(ge=500)] = 3000  # an owner that is silent this long may be replaced
    renew_ms: Annotated[int, Field(ge=100)] = 1000
    flush_tokens: Annotated[int, Field(ge=1)] = 8  # a chunk is written at this many tokens ...
    flush_ms: Annotated[int, Field(ge=0)] = 25  # ... or after this time, the first token at once
    window_tokens: Annotated[int, Field(ge=16)] = 4096  # not durable in one home; then its sequences pause
    engine_hang_s: Annotated[float, Field(gt=0)] = 30.0  # an engine that reports nothing this long is killed
    max_rss_mb: Annotated[int, Field(ge=0)] = 4096  # a worker above it (its engine apart) drains and ends; 0 never
    drain_s: Annotated[float, Field(ge=0)] = 30.0  # what runs longer after SIGTERM is handed back

    # The reconciler
    sweep_s: Annotated[float, Field(gt=0)] = 1.0
    accepted_grace_s: Annotated[float, Field(gt=0)] = 5.0  # an `accepted` older than this is published again
    queued_check_s: Annotated[float, Field(gt=0)] = 60.0  # a `queued` older than this is looked for in the broker

    # Webhooks
    webhook_timeout_s: Annotated[float, Field(gt=0)] = 10.0  # one try, from resolving the name to the answer's status
    # Pauses between tries, each shortened by up to a tenth; then the webhook is given up, within 24 hours.
    webhook_retries_s: tuple[Annotated[float, Field(ge=0)], ...] = (5, 30, 120, 600, 3600, 10_800, 21_600, 43_200)
    webhook_in_flight: Annotated[int, Field(ge=1)] = 64  # tries at once
    webhook_in_flight_each: Annotated[int, Field(ge=1)] = 16  # of one tenant, whose receivers may be slow
    webhook_allow_loopback: bool = False  # for development: http, and addresses of this machine

    log_level: str = "INFO"

    @field_validator("region")
    @classmethod
    def _plain_region(cls, value: str) -> str:
        if not WORD.match(value):
            raise ValueError("must be one word of a-z and 0-9, at most 32 characters")
        return value

    @model_validator(mode="after")
    def _webhooks_end_before_their_records(self) -> Self:
        if sum(self.webhook_retries_s) > self.retention_s:
            raise ValueError("webhook_retries_s together must not be longer than retention_s")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=_config_file())

    @property
    def here(self) -> Region:
        return self.reach(self.region)

    def reach(self, region: str) -> Region:
        try:
            return self.regions[region]
        except KeyError:
            raise ConfigurationError(
                f"regions.{region} is not set: no address is known for region {region!r}"
            ) from None

    def expires_s(self, lane: Lane) -> int:
        """How long a job of this lane may take when it does not say."""
        return min(self.lane_expires_s.get(lane, self.default_expires_s), self.max_expires_s)

    def prefetch(self, lane: Lane) -> int:
        """Messages a worker holds of one lane's queue: what its engine can start, less for the batch lane."""
        return max(1, self.slots // 2) if lane is Lane.BATCH else self.slots


def _config_file() -> Path | None:
    named = os.environ.get("LINGBOT_CONFIG")
    if named:
        path = Path(named)
        if not path.is_file():
            raise ConfigurationError(f"LINGBOT_CONFIG names {named}, which is no file")
        return path
    return next((path for path in _FILES if path.is_file()), None)


def read(**overrides: object) -> Settings:
    """Read file and environment afresh. Raises ConfigurationError that names the keys at fault."""
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise ConfigurationError(f"bad settings: {faults}") from None


@lru_cache(maxsize=1)
def load() -> Settings:
    """This process's settings, read at the first call."""
    return read()
