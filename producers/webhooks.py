"""Webhooks as requests name them, checked before anything is stored."""

from __future__ import annotations

import base64
import binascii

from brokers import egress
from brokers.job import Webhook
from brokers.settings import Settings
from producers.problems import Problem
from producers.schemas import WebhookRequest

_SECRET_LEAST, _SECRET_MOST = 24, 64  # as Standard Webhooks says


def checked(settings: Settings, asked: WebhookRequest | None) -> Webhook | None:
    """Raises Problem for an address that would never be called. What its name resolves to is seen at each call."""
    if asked is None:
        return None
    try:
        egress.check_url(asked.url, allow_loopback=settings.webhook_allow_loopback)
    except egress.Refused as refused:
        raise Problem("invalid_parameter", f"webhook.url: {refused.message}", param="webhook.url") from None
    return Webhook(asked.url, _secret(asked.secret))


def _secret(given: str | None) -> str | None:
    if given is None:
        return None
    text = given.removeprefix("whsec_")
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if not _SECRET_LEAST <= len(key) <= _SECRET_MOST:
        raise Problem(
            "invalid_parameter",
            f"webhook.secret: {_SECRET_LEAST} to {_SECRET_MOST} bytes in base64, after whsec_ or without it",
            param="webhook.secret",
        )
    return f"whsec_{text}"
