"""submit, tail, cancel, jobs."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from brokers.errors import ConfigurationError
from brokers.job import Kind
from compose.cli import output
from compose.cli.client import Client, Refused, Unreachable
from compose.cli.cursors import Cursor
from compose.cli.follow import Event, follow

INTERRUPTED = 130


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from its argument, a file, or stdin. Raises a usage error when there is none, or two."""
    if argument is not None and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if file is not None:
        return _not_empty(_read_file(file), f"{file} is empty")
    if argument is not None and argument != "-":
        return _not_empty(argument, "the prompt is empty")
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or text on stdin")
    return _not_empty(_read_stdin(), "nothing came on stdin")


def read_texts(arguments: list[str] | None, file: Path | None) -> list[str]:
    """Texts to embed, from arguments, or a line each from a file or stdin. Raises a usage error when there is none."""
    if arguments:
        if file is not None:
            raise typer.BadParameter("give texts or --file, not both")
        return arguments
    return [line for line in read_prompt(None, file).splitlines() if line.strip()]


def default_model(client: Client, kind: Kind) -> str:
    """The first model of that kind. Raises Refused, Unreachable, ConfigurationError."""
    models = [each for each in client.get("/v1/models").get("data", []) if each.get("kind", Kind.TEXT) == kind]
    if not models:
        raise ConfigurationError(
            f"this platform serves no model of kind {kind}", hint="`lingbot models import` brings one."
        )
    return str(models[0]["id"])


def submit(client: Client, body: dict[str, Any], *, detach: bool) -> int:
    """Send a job and show what it writes as it comes; the exit code."""
    began = time.monotonic()
    try:
        job = _create(client, body)
    except KeyboardInterrupt:
        output.remark("\nInterrupted before the job was accepted; `lingbot jobs` shows whether it was.")
        return INTERRUPTED
    if detach:
        sys.stdout.write(f"{job['id']}\n")
        output.remark(f"Read it with: lingbot tail {job['id']}")
        return 0
    return show(client, job["id"], Cursor(job["id"]), since=began)


def show(client: Client, job_id: str, cursor: Cursor, since: float | None = None) -> int:
    """Show what a job writes from the cursor on; the exit code. Ctrl-C leaves the job running.

    `since` is when it was asked for, where that was here: then its end is told with the time it took.
    """
    try:
        for event in follow(client, job_id, cursor.position, on_pause=_lost):
            with _uninterrupted():  # what was shown and what is remembered must not differ
                _show(event)
                cursor.move(event.position)
            if event.kind == "end":
                return _ended(job_id, event.data, None if since is None else time.monotonic() - since)
    except KeyboardInterrupt:
        output.remark(
            f"\nThe job goes on. Come back with: lingbot tail {job_id}   End it with: lingbot cancel {job_id}"
        )
        return INTERRUPTED
    except Unreachable as away:
        raise Unreachable(away.message, hint=f"The job goes on. Come back with: lingbot tail {job_id}") from away
    finally:
        cursor.save()
        cursor.forget_old()
    return 1


def show_list(jobs: list[dict[str, Any]]) -> None:
    columns = ("job", "status", "model", "lane", "written", "created")
    output.show_table(columns, [_row(job) for job in jobs])


def _row(job: dict[str, Any]) -> tuple[object, ...]:
    created = datetime.fromtimestamp(job["created_at"], UTC).astimezone().strftime("%d %b %H:%M:%S")
    return job["id"], job["status"], job["model"], job["lane"], job.get("position", 0), created


def _create(client: Client, body: dict[str, Any]) -> Any:
    try:
        return client.post_once("/v1/jobs", body)
    except Refused as refused:
        if refused.problem == "bad_prompt" and "messages" in body:
            raise Refused(refused.message, hint="Send it as a plain prompt: add --plain.") from refused
        raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _show(event: Event) -> None:
    if event.kind == "token":
        output.write_text(event.data["text"])
    elif event.kind == "embedding":
        for index, embedding in enumerate(event.data["embeddings"], event.data["start"]):
            sys.stdout.write(json.dumps({"index": index, "embedding": embedding}) + "\n")
    elif event.kind == "progress" and event.data.get("kind") == "restarted":
        output.remark(f"\n[the text was generated again and differs; it goes on at token {event.position}]")


def _ended(job_id: str, data: dict[str, Any], seconds: float | None) -> int:
    status, usage, pos = data.get("status", "?"), data.get("usage") or {}, data.get("pos", 0)
    embeds = pos > 0 and usage.get("completion_tokens") == 0
    sys.stdout.write("" if embeds else "\n")
    sys.stdout.flush()
    amount = f"{pos} embeddings" if embeds else f"{usage.get('completion_tokens', pos)} tokens"
    reason = data.get("finish_reason")
    facts = [job_id, status, reason if reason != status else "", amount, "" if seconds is None else f"{seconds:.1f} s"]
    if failure := data.get("error"):
        facts.append(failure.get("message", ""))
    output.remark(" · ".join(fact for fact in facts if fact))
    return 0 if status == "succeeded" else 1


def _lost(reason: str) -> None:
    output.remark(f"\n[{reason}; trying again, nothing is lost]")


def _read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode()  # sys.stdin would hand on what is no UTF-8 as half characters
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"what came on stdin is no UTF-8: {error}") from error
    return text


def _not_empty(text: str, otherwise: str) -> str:
    if not text:
        raise typer.BadParameter(otherwise)
    return text


def _read_file(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}") from error
