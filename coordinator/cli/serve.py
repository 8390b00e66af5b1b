"""`model-boss serve`: the broker in the foreground. Registered by the package's `app`; runs `coordinator.server`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.config import load_or_fail
from coordinator.cli.link import ConfigOption


def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. [default: 8210]")] = None,
    models_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Folder with GGUF files; may be given several times.", exists=True, file_okay=False),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where leases and logs are kept.")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="A device to use instead of those found, such as sim0=8GiB; may be given several times."),
    ] = None,
) -> None:
    """Run the broker until Ctrl-C. Flags win over the environment, and that over the configuration file.

    Exit status 130 when it was interrupted before it answered.
    """
    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "models_dirs": models_dir or None,
        "state_dir": state_dir,
        "devices": ",".join(device) if device else None,
    }
    settings = load_or_fail(config, flags).settings
    warn_without_engine(settings.engines.llama_server)
    from coordinator.server import run

    raise typer.Exit(run(settings))


def warn_without_engine(named: Path | None) -> None:
    """Say at the start, not at the first request, that no model will load."""
    from inference.engines import find_llama_server
    from inference.errors import EngineMissing

    try:
        if find_llama_server(named) is not None:
            return
        problem = "there is no llama-server: `model-boss engines install llama-server` builds one"
    except EngineMissing as error:
        problem = error.message
    typer.secho(f"warning: no model can be loaded, for {problem}", fg="yellow", err=True)
