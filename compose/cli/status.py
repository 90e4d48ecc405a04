"""`lingbot status`: queues, workers and streams as tables."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compose.cli import output
from compose.cli.client import Client

_REFRESH_S = 2.0
_STATES = {"ready": "green", "draining": "yellow", "engine_down": "red"}


def show(client: Client, *, watch: bool, as_json: bool) -> None:
    if as_json:
        output.show_json(client.get("/v1/status"))
        return
    if not watch:
        output.out().print(render(client.get("/v1/status")))
        return
    _watch(client)


def render(status: dict[str, Any]) -> RenderableType:
    """Shows what is there; a field that this version of the API does not tell is a dash."""
    live = status.get("live_jobs", (status.get("streams") or {}).get("live", "-"))
    head = Text.assemble(("region ", "dim"), str(status.get("region", "-")), ("   live streams ", "dim"), str(live))
    parts: list[RenderableType] = [head, Text(), _queues(status.get("queues")), Text(), _workers(status.get("workers"))]
    parts += [Text(f"! {fault}", style="yellow") for fault in status.get("faults", [])]
    return Group(*parts)


def _watch(client: Client) -> None:
    from rich.live import Live

    try:
        with Live(render(client.get("/v1/status")), console=output.out(), auto_refresh=False) as live:
            while True:
                time.sleep(_REFRESH_S)
                live.update(render(client.get("/v1/status")), refresh=True)
    except KeyboardInterrupt:
        return


_ENGINE = {
    "slots": "slots",
    "running": "running",
    "waiting": "waiting",
    "KV tokens": "kv_tokens_used",
    "generated": "generated_tokens",
}
"""Columns of an engine, and the statistics that they show."""


def _queues(queues: list[dict[str, Any]] | None) -> RenderableType:
    table = _table("queue", "ready", "running", "consumers", "in /s", "out /s")
    for queue in queues or []:
        numbers = [queue.get(name) for name in ("ready", "unacked", "consumers", "publish_rate", "deliver_rate")]
        table.add_row(
            str(queue.get("name", "-")), *map(_number, numbers), style="" if queue.get("consumers") else "dim"
        )
    return table if queues is not None else Text("queues: not known now", style="yellow")


def _workers(workers: list[dict[str, Any]] | None) -> RenderableType:
    if not workers:
        return Text("no worker reports", style="yellow")
    table = _table("worker", "state", "model", *_ENGINE, "reused", "exact")
    for worker in workers:
        state = str(worker.get("state", "-"))
        for model, engine in (worker.get("engines") or {"-": {}}).items():
            stats = engine.get("stats") or {}
            numbers = [stats.get(name) for name in _ENGINE.values()]
            shown = Text(state, style=_STATES.get(state, ""))
            exact = "yes" if engine.get("exact") else "no"
            row = (*map(_number, numbers), _reused(stats), exact)
            table.add_row(str(worker.get("name", "-")), shown, model, *row)
    return table


def _reused(stats: dict[str, Any]) -> str:
    """The share of prompt tokens that earlier sequences had begun with."""
    reused, computed = (stats.get(f"{name}_tokens", 0) for name in ("reused", "prefilled"))
    return f"{reused / (reused + computed):.0%}" if reused + computed else "-"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in {"state", "model"} else "right")
    return table


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
