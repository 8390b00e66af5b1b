"""`model-boss demo`: the broker with two tiny models and memory for one, and what to try. Run by `make demo`.

The demo lives in the source checkout (`demo/`): configuration, manifests and models.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.output import fail, known_errors

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODELS = ("robin", "wren")

_OWN = {"GPUBOSS_DEVICES", "GPUBOSS_URL", "MODEL_BOSS_API_KEY", "MODEL_BOSS_MODELS_DIRS", "MODEL_BOSS_STATE_DIR"}
"""What the demo decides itself, whatever the environment says; GPUBOSS_STATE_DIR loses to the file's own anyway."""


def demo(port: Annotated[int | None, typer.Option(help="Port to listen on. [default: 8210]")] = None) -> None:
    """Run the broker with two tiny models and memory for one, and say what to try. From a source checkout only."""
    started_s = time.monotonic()
    config = DEMO / "model-boss.yaml"
    if not config.exists():
        fail(
            "the demo and its models are in the source checkout, not in the installed package: "
            "clone the repository, then run `make demo` there"
        )
    from coordinator.config_files import load_settings
    from inference.engines import find_llama_server

    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    with known_errors():
        settings = load_settings(config, {"port": port}, environ=environment).settings
        if find_llama_server(settings.engines.llama_server) is None:
            fail("there is no llama-server: run `make setup`, or `model-boss engines install llama-server`")
    from coordinator.server import run

    raise typer.Exit(run(settings, ready=_announcer(started_s), when_taken="end that one"))


def _announcer(started_s: float) -> Callable[[str], None]:
    def announce(url: str) -> None:
        typer.secho(f"\nModel Boss is ready on {url}", fg="green", bold=True, nl=False)
        typer.echo(f" ({time.monotonic() - started_s:.1f} s)\n")
        typer.echo("Two models, memory for one. Paste this into another terminal; the answer is streamed:\n")
        typer.echo(f"  {curl(url, MODELS[0])}\n")
        typer.echo("Then ask the other one. It waits a moment: the first has to leave the memory.\n")
        typer.echo(f"  {curl(url, MODELS[1])}\n")
        typer.echo(f"Who is in memory:  {_program()} ps --url {url}")
        typer.echo(f"All endpoints:     {url}/docs")
        typer.echo("Ctrl-C ends the demo, and every engine with it.")
        sys.stdout.flush()

    return announce


def curl(url: str, model: str) -> str:
    """A line to paste that streams an answer; -N because curl would hold it back otherwise."""
    body = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "Who are you?"}]}'
    )
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


def _program() -> str:
    """How this very program is called from here."""
    own = Path(sys.argv[0])
    if own.name != "model-boss" or shutil.which("model-boss") == str(own.absolute()):
        return "model-boss"
    path = own.absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
