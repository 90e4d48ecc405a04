"""Logging of every process: one line of JSON each, with no prompt and no secret in it."""

from __future__ import annotations

import logging
import sys

import structlog

from brokers.settings import Settings


def configure(settings: Settings) -> None:
    """Send the standard library's loggers through structlog to stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    logging.captureWarnings(True)
    # These say at INFO what every request does.
    for chatty in ("pika", "httpx", "httpx2", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
