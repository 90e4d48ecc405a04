"""`lingbot up` and `lingbot down`: the platform of this machine, from its start to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from brokers.errors import LingbotError
from compose.cli import output
from compose.cli.client import Client
from compose.cli.follow import follow
from compose.cli.target import Target
from compose.commands import FLOWER_USER
from compose.servers import rabbitmq
from compose.servers.errors import StartFailed
from compose.servers.process import wait_until_gone
from compose.supervisor.folder import StateFolder
from compose.supervisor.platform import Platform
from compose.supervisor.supervisor import Supervisor

DEMO_PROMPT = "Explain in three sentences why the sky is blue."
_DEMO_TOKENS = 120
_START_S = 600.0  # of a detached start; each part has a shorter limit of its own
_STOP_S = 90.0
_HURRY_S = 15.0


def up(state: Path, regions: Sequence[str], *, demo: bool) -> None:
    """Run the platform until a signal. Raises AlreadyRunning, ServerMissing, StartFailed, ConfigurationError."""
    folder = StateFolder(state)
    with folder.held():
        folder.end_leftovers()
        platform = Platform(folder, regions)
        tiers = platform.tiers()
        for sentence in platform.moved():
            output.remark(sentence)
        report = TerminalReport(sum(len(tier.servers) for tier in tiers))
        with report:
            Supervisor(tiers, report).run(lambda: _came_up(platform, report, demo=demo))


def up_detached(state: Path, regions: Sequence[str]) -> None:
    """Run the platform in the background; returns once it is up. Raises StartFailed with the end of its log."""
    folder = StateFolder(state)
    log = folder.log("supervisor")
    log.parent.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "compose.cli.main",
        "up",
        "--state",
        str(folder.root),
        "--regions",
        ",".join(regions),
    ]
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    deadline = time.monotonic() + _START_S
    while not folder.is_ready(child.pid):
        if child.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(f"the platform did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)
    sys.stdout.write(log.read_text())


def down(state: Path) -> None:
    """Stop the platform that runs from this folder, and whatever a killed one left."""
    folder = StateFolder(state)
    supervisor = folder.supervisor()
    if supervisor is None:
        ended = folder.end_leftovers()
        output.remark(f"nothing ran; {ended} leftover processes ended" if ended else "nothing runs")
        return
    with output.err().status("stopping"):
        _stop(supervisor)
    folder.end_leftovers()
    output.remark("stopped; the data is kept")


def _stop(supervisor: psutil.Process) -> None:
    for patience_s in (_STOP_S, _HURRY_S):  # the second signal means at once
        supervisor.terminate()
        if wait_until_gone(supervisor, patience_s):
            return
    supervisor.kill()
    wait_until_gone(supervisor, _HURRY_S)


class TerminalReport:
    """Tells of the start with a bar on a terminal, in lines elsewhere, and of what dies later in lines."""

    def __init__(self, parts: int) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description:34}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=output.err(), transient=True)
        self._task = self._progress.add_task("starting", total=parts)
        self._starting: list[str] = []
        self._up = False

    def __enter__(self) -> None:
        if output.err().is_terminal:
            self._progress.start()

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def up(self) -> None:
        self._up = True
        self._progress.stop()

    def starting(self, name: str) -> None:
        self._starting.append(name)
        self._describe()
        if self._up:
            output.remark(f"{name} is started again")

    def ready(self, name: str, seconds: float) -> None:
        self._starting.remove(name)
        self._describe()
        self._progress.advance(self._task)
        output.remark(f"{name} is ready ({seconds:.1f} s)")

    def doing(self, step: str) -> None:
        self._progress.update(self._task, description=step)

    def died(self, name: str, code: int | None, pause_s: float) -> None:
        output.remark(f"{name} ended with code {code}; it is started again in {pause_s:.1f} s")

    def stopping(self) -> None:
        self._progress.stop()
        output.remark("stopping; the data is kept (once more Ctrl-C: at once)")

    def waiting(self, name: str, stop_means: str) -> None:
        output.remark(f"waiting for {name} to {stop_means}")

    def _describe(self) -> None:
        self._progress.update(self._task, description="starting " + ", ".join(self._starting))


def _came_up(platform: Platform, report: TerminalReport, *, demo: bool) -> None:
    report.up()
    platform.folder.mark_ready()
    if demo and platform.text_models:  # beside the supervisor, which goes on watching and hearing signals
        threading.Thread(target=_demonstrate, args=(platform,), name="demo", daemon=True).start()
    else:
        _print_summary(platform)


def _demonstrate(platform: Platform) -> None:
    try:
        with Client(Target(platform.api_url, platform.dev_key)) as client:
            _submit_demo(client, platform.text_models[0])
    except LingbotError as error:
        output.complain(error)
    _print_summary(platform)


def _submit_demo(client: Client, model: str) -> None:
    output.out().print(f"\n[bold]{model}[/] is asked: {DEMO_PROMPT}\n")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": DEMO_PROMPT}],
        "max_tokens": _DEMO_TOKENS,
        "temperature": 0,
        "lane": "interactive",
    }
    job = client.post("/v1/jobs", body)
    for event in follow(client, job["id"], 0, on_pause=output.remark):
        if event.kind == "token":
            output.write_text(event.data["text"])
        elif event.kind == "error":
            output.remark(f"\n{event.data.get('message')}")
    output.out().print()


def _print_summary(platform: Platform) -> None:
    command, root = _own_command(), _short(platform.folder.root)
    management = f"http://127.0.0.1:{platform.rabbitmq.management_port}"
    lines = [
        "",
        f"[bold]API[/]       {platform.api_url}   docs {platform.api_url}/docs",
        f"[bold]Flower[/]    {platform.flower_url}   login {FLOWER_USER}, password in {root}/flower.password",
        f"[bold]RabbitMQ[/]  {management}   login {rabbitmq.USER}, password in {root}/rabbitmq/password",
        f"[bold]Valkey[/]    127.0.0.1:{platform.valkey.port}   speaks Redis, password in {root}/valkey/password",
        f"[bold]API key[/]   {platform.dev_key}   (development; also in {root}/dev.key)",
        "",
        "Try next:",
        f'  {command} submit "Write a haiku about queues."',
        *([f'  {command} embed "a text" "another"'] if len(platform.models) > len(platform.text_models) else []),
        f"  {command} jobs",
        f"  {command} status",
        f"  {command} doctor",
        "",
        f"Ctrl-C or `{command} down` stops it. The data stays in {root}.",
    ]
    output.out().print("\n".join(lines), soft_wrap=True)


def _own_command() -> str:
    """How this person calls us: by name where PATH finds us, else by path."""
    found = shutil.which("lingbot")
    own = Path(sys.executable).with_name("lingbot")
    return "lingbot" if found and Path(found).resolve() == own.resolve() else _short(own)


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
