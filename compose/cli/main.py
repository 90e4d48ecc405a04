"""The `lingbot` command: every option in one place; what a command does lies in the file of its name.

Imports are late on purpose: each command loads what it needs, and none but `models import` and `worker` loads torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from brokers.errors import LingbotError
from brokers.job import TERMINAL, Kind, Lane
from compose.cli import dead, keys, models, output, target
from compose.cli.options import JsonOption, KeyOption, StateOption, UrlOption, connected
from compose.cli.paths import path

_STATE = Path(".lingbot")


class Group(TyperGroup):
    """Shows every error of ours as one line with a hint, and ends with code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LingbotError as error:
            output.complain(error)
            raise typer.Exit(1) from None


app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, help="The generation platform.")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(dead.app, name="dead")
app.add_typer(dead.webhooks, name="webhooks")


@app.command()
def up(
    state: StateOption = _STATE,
    regions: Annotated[str, typer.Option(help="Regions of this machine, with commas between.")] = "local",
    demo: Annotated[bool, typer.Option("--demo", help="Submit a prompt once everything runs.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Go on in the background.")] = False,
) -> None:
    """Start the platform of this folder: RabbitMQ, Valkey, API, worker, reconciler, Flower. Ctrl-C stops it."""
    from compose.cli.up import up, up_detached

    names = _words(regions)
    if detach:
        up_detached(state, names)
    else:
        up(state, names, demo=demo)


@app.command()
def down(state: StateOption = _STATE) -> None:
    """Stop the platform of this folder. Its data is kept."""
    from compose.cli.up import down

    down(state)


@app.command("url")
def show_url(url: UrlOption = None) -> None:
    """Print the API's address, for scripts."""
    typer.echo(target.find(url).url)


@app.command()
def declare() -> None:
    """Declare the queues of the region the settings name, for the models of the origin. `up` does this by itself."""
    from brokers import settings as settings_module
    from brokers import topology
    from brokers.models import Registry

    settings = settings_module.read()
    names = [model.card.name for model in Registry(settings.models_dir).all()]
    topology.declare(settings, names)
    output.remark(f"declared for {', '.join(names) or 'no model'} in region {settings.region}")


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Queues, workers, streams and rates (needs a key with the scope admin)."""
    from compose.cli.status import show

    with connected(url, key) as client:
        show(client, watch=watch, as_json=as_json)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check every part and say how to mend what is wrong. Code 1 when something is."""
    from compose.cli.doctor import examine, report

    if not report(examine(), as_json=as_json):
        raise typer.Exit(1)


@app.command()
def submit(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model; the first one served when not given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    lane: Annotated[Lane, typer.Option(help="Which queue.")] = Lane.INTERACTIVE,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Send a plain prompt, not a chat message.")] = False,
    delay: Annotated[float | None, typer.Option(min=0, help="Seconds before it starts.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job's id and leave.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Generate: the text comes as it is written. Ctrl-C leaves the job running."""
    from compose.cli import jobs

    if plain and system is not None:
        raise typer.BadParameter("a plain prompt has no system message")
    text = jobs.read_prompt(prompt, file)
    messages = [{"role": "system", "content": system}] if system else []
    content = {"prompt": text} if plain else {"messages": [*messages, {"role": "user", "content": text}]}
    drawn = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or None}
    options = {**drawn, "delay": delay}
    given = {name: value for name, value in options.items() if value is not None}
    with connected(url, key) as client:
        body = {"model": model or jobs.default_model(client, Kind.TEXT), "lane": lane.value, **content, **given}
        raise typer.Exit(jobs.submit(client, body, detach=detach))


@app.command()
def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; nothing reads stdin, a text a line.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read them from a file, a text a line.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model; the first one that embeds when not given.")] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Cut each vector to so many.")] = None,
    lane: Annotated[Lane, typer.Option(help="Which queue.")] = Lane.INTERACTIVE,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job's id and leave.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Make vectors of texts: each is a line of JSON, in the order of the texts. Ctrl-C leaves the job running."""
    from compose.cli import jobs

    body: dict[str, Any] = {"input": jobs.read_texts(texts, file), "lane": lane.value}
    body |= {"dimensions": dimensions} if dimensions else {}
    with connected(url, key) as client:
        body["model"] = model or jobs.default_model(client, Kind.EMBEDDING)
        raise typer.Exit(jobs.submit(client, body, detach=detach))


@app.command()
def tail(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    after: Annotated[int | None, typer.Option(min=0, help="Go on after this position.")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Show all of it again.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Show what a job writes, from where it was last shown."""
    from compose.cli import jobs
    from compose.cli.cursors import Cursor

    cursor = Cursor(job)
    if after is not None or from_start:
        cursor.position = after or 0
    with connected(url, key) as client:
        raise typer.Exit(jobs.show(client, job, cursor))


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="The job's id.")], url: UrlOption = None, key: KeyOption = None
) -> None:
    """End a job. What it wrote so far is kept."""
    with connected(url, key) as client:
        status = client.post(path("jobs", job, "cancel"))["status"]
    output.remark(f"{job} is {status}" if status in TERMINAL else f"{job} was {status} and ends now")


@app.command()
def erase(
    job: Annotated[str, typer.Argument(help="The job's id.")], url: UrlOption = None, key: KeyOption = None
) -> None:
    """Delete a job with its text, for good. One that still runs ends."""
    with connected(url, key) as client:
        client.delete(path("jobs", job))
    output.remark(f"{job} is erased")


@app.command("jobs")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=100, help="Jobs at most.")] = 20,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Your jobs, newest first."""
    from compose.cli import jobs

    with connected(url, key) as client:
        found = client.get("/v1/jobs", limit=limit)["data"]
    if as_json:
        output.show_json(found)
    else:
        jobs.show_list(found)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(
    context: typer.Context,
    models: Annotated[str, typer.Option(help="Which models, with commas between; all when not given.")] = "",
    lanes: Annotated[str, typer.Option(help="Which lanes, with commas between; all when not given.")] = "",
    name: Annotated[str | None, typer.Option(help="Its name, unique on this machine; made up if not given.")] = None,
    region: Annotated[str | None, typer.Option(help="Whose queues.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences in one batch.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")] = None,
    engine: Annotated[str | None, typer.Option(help="transformers or vllm; each model's own if not given.")] = None,
) -> None:
    """Run a Celery worker on the right queues. What is not known here goes to `celery worker`."""
    from compose.cli.worker import Choice, become_worker

    # Two of one name would fight for one control queue; the process keeps its id when it becomes the worker.
    name = name or f"worker-{os.getpid()}"
    become_worker(Choice(_words(models), _words(lanes), name, region, slots, device, engine), extra=context.args)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    app()
