"""`lingbot dead`: jobs that workers gave up on; `lingbot webhooks`: ends that were never heard."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from compose.cli import output
from compose.cli.options import JsonOption, KeyOption, UrlOption, connected
from compose.cli.paths import path

app = typer.Typer(
    help="Jobs that workers gave up on: list, show, replay, drop (needs a key with the scope admin).",
    no_args_is_help=True,
)
webhooks = typer.Typer(
    help="Webhooks that were given up: list, replay (needs a key with the scope admin).", no_args_is_help=True
)

JobArgument = Annotated[str, typer.Argument(help="The job's id.")]
LimitOption = Annotated[int, typer.Option(min=1, max=100, help="Of them at most.")]


@app.command("list")
def list_dead(
    limit: LimitOption = 20, as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None
) -> None:
    """Messages in the region's dead-letter queue, the oldest first."""
    with connected(url, key) as client:
        found = client.get("/v1/dead", limit=limit)["data"]
    columns = ("job", "tenant", "model", "lane", "status", "reason", "died")
    _show(found, columns, [(*_words(each, columns[:-1]), _when(each.get("died_at"))) for each in found], as_json)


@app.command()
def show(job: JobArgument, url: UrlOption = None, key: KeyOption = None) -> None:
    """One dead letter, without its prompt."""
    with connected(url, key) as client:
        output.show_json(client.get(path("dead", job)))


@app.command()
def replay(job: JobArgument, url: UrlOption = None, key: KeyOption = None) -> None:
    """Submit it again as a new job of the same tenant, whose id is printed. The dead letter is gone then."""
    with connected(url, key) as client:
        made = client.post(path("dead", job, "replay"))
    sys.stdout.write(f"{made['id']}\n")
    output.remark(f"{job} runs again as {made['id']}")


@app.command()
def drop(job: JobArgument, url: UrlOption = None, key: KeyOption = None) -> None:
    """Drop a dead letter. Its job's record stays as it is."""
    with connected(url, key) as client:
        client.delete(path("dead", job))
    output.remark(f"dropped {job}")


@webhooks.command("list")
def list_webhooks(
    limit: LimitOption = 20, as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None
) -> None:
    """Webhooks that were given up, the latest first."""
    with connected(url, key) as client:
        found = client.get("/v1/webhooks/dead", limit=limit)["data"]
    columns = ("job", "tenant", "status", "tries", "error", "given up")
    _show(found, columns, [(*_words(each, columns[:-1]), _when(each["given_up_at"])) for each in found], as_json)


@webhooks.command("replay")
def replay_webhook(job: JobArgument, url: UrlOption = None, key: KeyOption = None) -> None:
    """Tell a job's end again, with all tries."""
    with connected(url, key) as client:
        client.post(path("webhooks", "dead", job, "replay"))
    output.remark(f"the webhook of {job} is due")


def _show(found: list[Any], columns: tuple[str, ...], rows: list[tuple[object, ...]], as_json: bool) -> None:
    if as_json:
        output.show_json(found)
    elif not found:
        output.remark("none: nothing was given up")
    else:
        output.show_table(columns, rows)


def _words(each: dict[str, Any], names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple("-" if each.get(name) is None else each[name] for name in names)


def _when(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).astimezone().strftime("%d %b %H:%M:%S")
