"""The state folder: one supervisor at a time, private, and found again."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from compose.supervisor.folder import AlreadyRunning, StateFolder

_HOLDER = """
import sys, time
from pathlib import Path
from compose.supervisor.folder import StateFolder
with StateFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_supervisor_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AlreadyRunning, match=str(holder.pid)), StateFolder(tmp_path).held():
            pass
    finally:
        holder.kill()
        holder.wait()
    with StateFolder(tmp_path).held():  # what a killed one held is free
        supervisor = StateFolder(tmp_path).supervisor()
        assert supervisor
        assert supervisor.pid == os.getpid()
    assert StateFolder(tmp_path).supervisor() is None


def test_nobody_else_may_look_inside(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700


def test_a_mark_of_another_supervisor_does_not_make_it_ready(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    with folder.held():
        folder.mark_ready()
        assert folder.is_ready(os.getpid())
        assert not folder.is_ready(os.getpid() + 1)
    assert not folder.is_ready(os.getpid())
