"""The command's own decisions: where it looks, what it remembers, how it complains."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from compose.cli import target
from compose.cli.cursors import Cursor
from compose.cli.main import app
from compose.cli.paths import path
from compose.cli.status import render


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a platform's files, and us below it."""
    below = tmp_path / "some" / "where"
    below.mkdir(parents=True)
    state = tmp_path / ".lingbot"
    state.mkdir()
    (state / "ports.json").write_text(json.dumps({"api": 8123}))
    (state / "dev.key").write_text("lb_dev_x\n")
    monkeypatch.chdir(below)
    for name in ("LINGBOT_URL", "LINGBOT_KEY"):
        monkeypatch.delenv(name, raising=False)
    return state


def test_the_platform_of_a_folder_above_is_found(state: Path) -> None:
    assert target.find() == target.Target("http://127.0.0.1:8123", "lb_dev_x")


def test_scripts_learn_the_address(state: Path) -> None:
    assert CliRunner().invoke(app, ["url"]).stdout == "http://127.0.0.1:8123\n"


def test_options_win_over_the_environment_and_that_over_the_folder(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINGBOT_URL", "http://from-env/")
    monkeypatch.setenv("LINGBOT_KEY", "env-key")
    assert target.find() == target.Target("http://from-env", "env-key")
    assert target.find("http://option", "option-key") == target.Target("http://option", "option-key")


def test_without_a_platform_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINGBOT_URL", raising=False)
    result = CliRunner().invoke(app, ["jobs"])
    assert result.exit_code == 1
    assert "lingbot up" in result.stderr


def test_an_api_that_is_away_is_one_line_and_code_1() -> None:
    result = CliRunner().invoke(app, ["submit", "hi", "--url", "http://127.0.0.1:9", "--key", "k"])
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_usage_is_code_2() -> None:
    for arguments in (
        ["submit", "hi", "--file", "x"],
        ["submit", ""],
        ["submit", "hi", "--temperature", "3"],
        ["no-such-command"],
    ):
        assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("given", [b"", b"\xff\xfe"])
def test_stdin_without_a_prompt_is_bad_usage(given: bytes) -> None:
    result = CliRunner().invoke(app, ["submit", "--url", "http://127.0.0.1:9", "--key", "k"], input=given)
    assert result.exit_code == 2
    assert "stdin" in result.stderr


def test_a_cursor_goes_on_where_it_was(tmp_path: Path) -> None:
    cursor = Cursor("job1", tmp_path)
    cursor.move(17)
    cursor.save()
    assert Cursor("job1", tmp_path).position == 17
    assert Cursor("job2", tmp_path).position == 0


def test_a_job_id_cannot_lead_a_cursor_out_of_its_folder(tmp_path: Path) -> None:
    cursor = Cursor("../../evil", tmp_path / "cursors")
    cursor.move(1)
    cursor.save()
    assert [path.name for path in (tmp_path / "cursors").iterdir()] == ["evil"]


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"queues": None, "workers": [], "faults": ["RabbitMQ is away"]},
        {"region": "a", "queues": [{"name": "q"}], "workers": [{"name": "w"}]},
        {"workers": [{"name": "w", "state": "ready", "engines": {"m": {"stats": {"slots": 16}}}}]},
    ],
)
def test_status_shows_what_is_there(status: dict[str, Any]) -> None:
    assert render(status)


def test_status_tells_what_an_engine_cannot_do() -> None:
    engine = {"engine": "vllm", "lacks": ["pause", "keyed_sampling"], "stats": {"slots": 16}}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render({"workers": [{"name": "w", "state": "ready", "engines": {"m": engine}}]}))
    shown = console.export_text()
    assert "vllm" in shown
    assert "pause, keyed sampling" in shown


def test_the_command_starts_without_torch() -> None:
    heavy = ("torch", "transformers", "httpx", "celery")
    code = f"import sys, compose.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_user_typed_stays_one_part_of_the_path() -> None:
    assert path("jobs", "../keys", "cancel") == "/v1/jobs/..%2Fkeys/cancel"
