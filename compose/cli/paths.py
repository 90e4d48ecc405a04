"""Paths of the API from what a user typed."""

from __future__ import annotations

from urllib.parse import quote


def path(*parts: str) -> str:
    """A path; what a user typed stays one part of it, whatever is in it."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
