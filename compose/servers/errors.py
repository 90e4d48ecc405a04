"""What can go wrong while a private server is started."""

from __future__ import annotations

from brokers.errors import LingbotError


class ServerMissing(LingbotError):
    """A server program is not installed on this machine."""

    code = "server_missing"
    hint = "Install it, then start again."


class StartFailed(LingbotError):
    """A part did not start."""

    code = "start_failed"
    hint = "The end of its log is shown above; the whole log lies in .lingbot/logs."
