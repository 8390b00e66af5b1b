"""The `model-boss` command. One module per group of sub-commands; each imports what it needs when it runs, so that
`--help` and completion stay quick.

    serve.py demo.py      run the broker
    ps.py explain.py      ask a running one, over HTTP (`link.py`): what is loaded, why does a model wait?
    status.py loading.py  its models and logs; load and unload
    engines.py            the programs that run models
    simulate.py trace.py  what other devices or another policy would do with the same requests
    config.py             the configuration
    doctor.py checks.py   is everything here?
    output.py             tables, JSON, errors, exit codes
"""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli import config, demo, doctor, engines, explain, loading, ps, serve, simulate, status, trace
from coordinator.cli.output import EXIT_CODES

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Many local models behind one OpenAI-compatible API, loaded and evicted inside a memory budget.",
    epilog=f"Start with: model-boss init, then model-boss serve. {EXIT_CODES}",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"model-boss {version('model-boss')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command(epilog="Example: model-boss serve --models-dir ~/models --port 8210")(serve.serve)
app.command(epilog="Example: make demo")(demo.demo)
app.command(epilog="Example: model-boss init --models ~/models")(config.init)
app.command(epilog="Example: model-boss ps --json")(ps.ps)
app.command(epilog="Example: model-boss models")(status.models)
app.command(epilog="Example: model-boss load qwen3-8b")(loading.load)
app.command(epilog="Example: model-boss unload qwen3-8b")(loading.unload)
app.command(epilog="Example: model-boss explain qwen3-8b --priority high")(explain.explain)
app.command(epilog="Example: model-boss logs qwen3-8b --follow")(status.logs)
app.command(epilog="Example: model-boss doctor --json")(doctor.doctor)
app.command(epilog="Example: model-boss trace --out day.jsonl.gz --for 8h")(trace.trace)
app.command(epilog=simulate.EXAMPLES)(simulate.simulate)
app.add_typer(config.app, name="config")
app.add_typer(engines.app, name="engines")


def main() -> None:
    """Run the command line; the entry point of the `model-boss` script."""
    app()
