"""`model-boss engines list|install`: which llama-server is used, and building one.

The work is done by `inference.engines`; this draws it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.link import ConfigOption, JsonOption
from coordinator.cli.output import ExitCode, fail, print_json, print_table

if TYPE_CHECKING:
    from inference.engines.accelerator import Choice, Tools
    from inference.engines.cache import Installed
    from inference.engines.progress import Progress, Report
    from inference.engines.resolve import Candidate

app = typer.Typer(
    no_args_is_help=True,
    help="The programs that run models: which are used, and building them.",
    epilog="Example: model-boss engines list",
)


@app.command("list", epilog="Example: model-boss engines list --json")
def list_engines(config: ConfigOption = None, json: JsonOption = False) -> None:
    """List every place where a llama-server is looked for, in order; the first usable one is used."""
    from coordinator.cli.config import load_or_fail
    from inference.engines.resolve import list_llama_servers

    candidates = list_llama_servers(load_or_fail(config).settings.engines.llama_server)
    used = next((candidate for candidate in candidates if candidate.problem is None), None)
    if json:
        print_json(
            [
                {
                    "engine": "llama-server",
                    "origin": candidate.origin.value,
                    "path": str(candidate.path) if candidate.path else None,
                    "version": candidate.version,
                    "accelerator": candidate.accelerator,
                    "used": candidate is used,
                    "problem": candidate.problem or candidate.complaint,
                }
                for candidate in candidates
            ]
        )
        return
    rows = [
        (
            candidate.origin.value,
            str(candidate.path or "-"),
            candidate.version or "-",
            candidate.accelerator or "-",
            _verdict(candidate, used),
        )
        for candidate in candidates
    ]
    print_table(("looked at", "llama-server", "version", "accelerator", "verdict"), rows)


@app.command(epilog="Example: model-boss engines install llama-server --accelerator cpu")
def install(
    engine: Annotated[str, typer.Argument(help="Only `llama-server` so far.")],
    accelerator: Annotated[
        str | None, typer.Option(help="cpu, cuda, hip, vulkan or metal. [default: what this machine has]")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="The source archive, if it cannot be fetched; its hash is checked.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at once. [default: one per processor]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build it even if it is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Build llama-server (and ggml-rpc-server, llama-fit-params) from source into the per-user cache.

    Takes some minutes, 700 MB of disk meanwhile and 30 MB afterwards. An interrupted build is continued by the next.
    """
    from inference.engines import accelerator as accelerators
    from inference.engines import errors
    from inference.engines.build import Order
    from inference.engines.build import install as build
    from inference.engines.recipe import llama_server_recipe
    from inference.engines.source import Archive

    if engine != "llama-server":
        fail(f"unknown engine '{engine}': this version installs llama-server", ExitCode.USAGE)
    tools = accelerators.this_machine()
    try:
        choice = _choice(accelerator, tools)
        _tell_choice(choice)
        recipe = llama_server_recipe(choice.accelerator, choice.flags)
        order = Order(recipe, Archive(source), choice.environment or {}, force, jobs)
        with _progress() as report:
            entry = build(order, report)
    except errors.InstallError as error:
        fail(f"{error.message}\n\n{errors.OTHER_WAYS}")
    except KeyboardInterrupt:
        fail("interrupted; the next `model-boss engines install llama-server` goes on from here", ExitCode.INTERRUPTED)
    _tell_result(entry, json)


def _verdict(candidate: Candidate, used: Candidate | None) -> str:
    if candidate is used:
        return "used" if candidate.complaint is None else f"used, although it {candidate.complaint}"
    return candidate.problem or "usable"


def _choice(accelerator: str | None, tools: Tools) -> Choice:
    from inference.engines.accelerator import Accelerator, choose, detect

    if accelerator is None:
        return detect(tools)
    try:
        return choose(Accelerator(accelerator.lower()), tools)
    except ValueError:
        known = ", ".join(Accelerator)
        fail(f"unknown accelerator '{accelerator}': one of {known}", ExitCode.USAGE)


def _tell_choice(choice: Choice) -> None:
    typer.echo(f"llama-server for {choice.accelerator.upper()} ({choice.why})", err=True)
    if choice.hint is not None:
        typer.secho(f"note: {choice.hint}", fg="yellow", err=True)


def _tell_result(entry: Installed, json: bool) -> None:
    from inference.engines.resolve import find_llama_server
    from inference.errors import EngineMissing

    if json:
        print_json(
            {
                "engine": "llama-server",
                "path": str(entry.binary),
                "version": entry.reported,
                "accelerator": entry.accelerator,
                "build_s": entry.build_s,
            }
        )
    else:
        typer.echo(f"llama-server {entry.reported} ({entry.accelerator}): {entry.binary}")
    try:
        used = find_llama_server()
    except EngineMissing as error:
        typer.secho(f"note: this one is not used: {error.message}", fg="yellow", err=True)
        return
    if used != entry.binary:
        typer.secho(f"note: {used} comes first and is used (see `model-boss engines list`)", fg="yellow", err=True)


@contextmanager
def _progress() -> Iterator[Report]:
    """Give a function that shows a build's reports: a bar on a terminal, a line now and then elsewhere."""
    if not sys.stderr.isatty():
        yield plain_reporter(lambda line: typer.echo(line, err=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn())
    text = TextColumn("{task.fields[text]}", style="dim")
    with Bars(*columns, TimeElapsedColumn(), text, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None, text="")

        def report(progress: Progress) -> None:
            bars.update(
                task,
                description=progress.stage.value,
                completed=progress.done,
                total=progress.total or None,
                text=progress.text.rpartition("/")[2][:60],
            )

        yield report


def plain_reporter(write: Callable[[str], None]) -> Report:
    """Return a report function for logs: a line for each stage, and one for each tenth of the compiling."""
    started_s = time.monotonic()
    last: tuple[str, int] | None = None

    def report(progress: Progress) -> None:
        nonlocal last
        tenth = progress.done * 10 // progress.total if progress.total else 0
        if last == (progress.stage.value, tenth):
            return
        last = (progress.stage.value, tenth)
        share = f" {tenth * 10}%" if progress.total else ""
        text = progress.text if progress.stage.value != "compile" else ""
        write(f"[{time.monotonic() - started_s:5.0f} s] {progress.stage.value}{share} {text}".rstrip())

    return report
