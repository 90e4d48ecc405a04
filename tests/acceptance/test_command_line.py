"""`lingbot` against a running platform: as a person and as a pipe use it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platform import APART_MODEL, Platform

_TIMEOUT_S = 60


class Shell:
    """Runs `lingbot` in a folder of its own, against the platform."""

    def __init__(self, platform: Platform, folder: Path) -> None:
        self._folder = folder
        self._environment = dict(os.environ) | {
            "LINGBOT_URL": platform.base_url,
            "LINGBOT_KEY": platform.admin_key,
            "XDG_STATE_HOME": str(folder),
        }

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "compose.cli.main", *arguments]
        return subprocess.run(
            command,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            cwd=self._folder,
            env=self._environment,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "compose.cli.main", *arguments]
        return subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env=self._environment,
        )


@pytest.fixture
def lingbot(platform: Platform, tmp_path: Path) -> Shell:
    return Shell(platform, tmp_path)


@pytest.fixture
def slow_job(lingbot: Shell) -> Iterator[str]:
    """A job that runs for many seconds."""
    job = lingbot("submit", "--detach", "--max-tokens", "4000", "!slow@50 a long one").stdout.strip()
    yield job
    lingbot("cancel", job)


def test_the_text_goes_to_stdout_and_the_remarks_do_not(lingbot: Shell) -> None:
    done = lingbot("submit", "hello", "--max-tokens", "20", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "20 tokens" in done.stderr
    assert "20 tokens" not in done.stdout


def test_the_prompt_comes_from_an_argument_a_file_or_stdin(lingbot: Shell, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello")
    options = ("--max-tokens", "16", "--seed", "7")
    texts = {
        lingbot("submit", "hello", *options).stdout,
        lingbot("submit", "--file", "prompt.txt", *options).stdout,
        lingbot("submit", *options, stdin="hello").stdout,
    }
    assert len(texts) == 1
    assert texts.pop().strip()


def test_a_plain_prompt_is_another_one_than_a_chat_message(lingbot: Shell) -> None:
    options = ("--max-tokens", "32", "--seed", "7")
    assert lingbot("submit", "hello", *options).stdout != lingbot("submit", "hello", "--plain", *options).stdout


def test_ctrl_c_leaves_the_job_and_tail_goes_on_where_it_was(lingbot: Shell) -> None:
    shell = lingbot.start("submit", "!slow@30 long", "--max-tokens", "150", "--seed", "3")
    assert shell.stdout
    begun = shell.stdout.read(8)
    shell.send_signal(signal.SIGINT)
    rest, remarks = shell.communicate(timeout=_TIMEOUT_S)
    assert shell.returncode == 130
    job = re.search(r"lingbot tail (\w+)", remarks)
    assert job
    tailed = lingbot("tail", job[1])
    assert tailed.returncode == 0, tailed.stderr
    whole = lingbot("tail", job[1], "--from-start")
    assert begun + rest.rstrip("\n") + tailed.stdout == whole.stdout
    assert len(whole.stdout) > len(tailed.stdout)


def test_tail_after_a_position_shows_the_rest(lingbot: Shell) -> None:
    job = lingbot("submit", "--detach", "hello", "--max-tokens", "40", "--seed", "2").stdout.strip()
    whole = lingbot("tail", job).stdout
    rest = lingbot("tail", job, "--after", "16").stdout
    assert rest
    assert whole.endswith(rest)
    assert whole != rest


def test_cancel_ends_a_job_and_its_tail_says_so(lingbot: Shell, slow_job: str) -> None:
    assert lingbot("cancel", slow_job).returncode == 0
    tailed = lingbot("tail", slow_job)
    assert tailed.returncode == 1
    assert "cancelled" in tailed.stderr


def test_jobs_lists_the_newest_first(lingbot: Shell) -> None:
    job = lingbot("submit", "--detach", "hello", "--max-tokens", "2").stdout.strip()
    lingbot("tail", job)
    listed = json.loads(lingbot("jobs", "--json").stdout)
    assert listed[0]["id"] == job
    assert job in lingbot("jobs").stdout


def test_an_error_is_one_line_a_hint_and_code_1(lingbot: Shell) -> None:
    refused = lingbot("submit", "hello", "--model", "nope")
    assert refused.returncode == 1
    error, hint = refused.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert "nope" in error
    assert hint.startswith("hint: ")


def test_a_key_is_made_used_listed_and_revoked(lingbot: Shell, platform: Platform) -> None:
    key = lingbot("keys", "create", "--scopes", "read", "--name", "for a test").stdout.strip()
    assert lingbot("jobs", "--key", key).returncode == 0
    assert lingbot("submit", "hello", "--key", key).returncode == 1  # it may only read
    listed = json.loads(lingbot("keys", "list", "--json").stdout)
    made = next(each for each in listed if each["name"] == "for a test")
    assert key not in str(listed)
    assert lingbot("keys", "revoke", made["id"]).returncode == 0
    assert made["id"] not in lingbot("keys", "list").stdout


def test_status_shows_queues_and_workers(lingbot: Shell, platform: Platform) -> None:
    shown = lingbot("status")
    assert shown.returncode == 0, shown.stderr
    assert f"gen.local.{platform.model}.standard" in shown.stdout
    assert "ready" in shown.stdout


def test_models_lists_what_is_served(lingbot: Shell, platform: Platform) -> None:
    assert platform.model in lingbot("models", "list").stdout


def test_doctor_finds_nothing_but_the_model_without_a_worker(lingbot: Shell) -> None:
    looked = lingbot("doctor", "--json")
    findings = {each["part"]: each for each in json.loads(looked.stdout)}
    assert {"settings", "RabbitMQ", "queues", "Redis", "API", "workers", "reconciler"} <= set(findings)
    (finding,) = [each for each in findings.values() if not each["ok"]]
    assert finding["detail"] == f"no worker takes jobs for {APART_MODEL}"
    assert finding["mend"] == f"lingbot worker --models {APART_MODEL}"
    assert looked.returncode == 1
