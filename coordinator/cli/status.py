"""`model-boss models|logs`: looking at a running broker. Registered by the package's `app`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.link import ConfigOption, JsonOption, Link, UrlOption, complete_model, connect, quoted
from coordinator.cli.output import print_json, print_table, say
from gpuboss.units import format_bytes

ModelArgument = Annotated[str, typer.Argument(help="A model's id or alias.", autocompletion=complete_model)]

FOLLOW_S = 0.5
"""Between two looks of `logs --follow`."""
_WINDOW = 1000
"""Lines `logs --follow` compares to find what is new."""


def models(url: UrlOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """List every model the broker knows, those that cannot be served included, with what is wrong.

    A problem of a model that is not broken is one of its manifest: the version that was read before stays in force.
    """
    link = connect(url, config)
    with link.reading():
        known = link.look("/api/v1/models")["models"]
        if json:
            print_json(known)
            return
        if not known:
            typer.echo("no models: put GGUF files into a folder listed under `models_dirs`, or write a manifest")
            return
        columns = ("model", "state", ">context", ">size", ">claim", "source", "problem")
        print_table(columns, [_model_row(model) for model in known])


def logs(
    model: ModelArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="How many lines.")] = 100,
    url: UrlOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print the log of a model's engine."""
    link = connect(url, config)
    path = f"/api/v1/models/{quoted(model)}/logs"
    with link.reading():
        answer = link.look(path, lines=lines)
        if json:
            print_json(answer)
            return
        for line in answer["lines"]:
            say(line)
        if follow:
            _follow(link, path)
        elif not answer["lines"]:
            say(f"{answer['model']} has no log: it was not loaded since the broker started", err=True)


def _follow(link: Link, path: str) -> None:
    seen = link.look(path, lines=_WINDOW)["lines"]
    while True:
        time.sleep(FOLLOW_S)
        now = link.look(path, lines=_WINDOW)["lines"]
        for line in added(seen, now):
            say(line)
        seen = now


def added(before: list[str], now: list[str]) -> list[str]:
    """The lines of the window `now` that came after those of the window `before`; all of them for a new file."""
    for length in range(min(len(before), len(now)), 0, -1):
        if before[-length:] == now[:length]:
            return now[length:]
    return now


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        model["id"],
        "broken" if model["problem"] else model["state"],
        str(model["context"] or "-"),
        format_bytes(model["size_bytes"]),
        format_bytes(model["claim_bytes"]),
        _short(model["source"]),
        model["problem"] or model["never_fits"] or model["manifest_problem"] or "",
    )


def _short(path: str) -> str:
    home = str(Path.home())
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path
