"""Secrets: for their owner's eyes, and the same at every start."""

from __future__ import annotations

import stat
from pathlib import Path

from compose.servers import secret


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    first = secret.kept(tmp_path / "a" / "secret")
    assert secret.kept(tmp_path / "a" / "secret") == first
    assert len(first) >= 32


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    secret.kept(tmp_path / "secret")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_file_that_was_open_to_all_is_closed_by_a_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    secret.write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
