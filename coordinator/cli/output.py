"""How every command speaks: tables for people, JSON for programs, errors on stderr, and the exit codes.

Used by all modules of this package.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

import typer


class ExitCode(IntEnum):
    """What the exit status of every command means."""

    OK = 0
    """Done."""
    FAILED = 1
    """The answer is no: refused by the broker, a check that failed, a build that broke."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    NO_BROKER = 3
    """No broker answers at the address."""
    INTERRUPTED = 130
    """Ctrl-C ended what would have taken longer."""


EXIT_CODES = "Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 3 no broker answers."


def fail(message: str, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Print an error and end the command."""
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    say(message, err=True)
    raise typer.Exit(code)


def harmless(text: str) -> str:
    """What another program said, fit for a terminal: no control characters, but for line ends and tabs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def say(text: str, *, nl: bool = True, err: bool = False, fg: str | None = None) -> None:
    """Print what holds words of another program."""
    typer.secho(harmless(text), nl=nl, err=err, fg=fg)


@contextmanager
def known_errors() -> Iterator[None]:
    """Turn the errors of our packages into a message and an exit status, for people; bugs keep their traceback."""
    from gpuboss.errors import GpubossError
    from inference.engines.errors import InstallError
    from inference.errors import InferenceError
    from inference.yaml_files import BadInput

    try:
        yield
    except BadInput as error:
        fail(str(error), ExitCode.USAGE)
    except (GpubossError, InferenceError, InstallError) as error:
        fail(error.message)


def about(seconds: float) -> str:
    """A forecast, as far as it can be trusted: whole seconds, one at least."""
    return f"about {max(1, math.ceil(seconds))} s"


def count(number: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_json(value: object) -> None:
    """Print a value for programs."""
    typer.echo(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print rows for people; columns whose name starts with `>` are aligned to the right.

    Piped output is neither wrapped nor drawn with borders, so that it can be cut and searched. Whatever a cell holds
    is shown, and does nothing to the terminal or to the rows.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not _on_terminal():
        for row in ([column.lstrip(">") for column in columns], *rows):
            typer.echo("\t".join(harmless(cell).replace("\n", " ").replace("\t", " ") for cell in row))
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(harmless, row))
    Console(markup=False, emoji=False).print(table)


def _on_terminal() -> bool:
    return sys.stdout.isatty()
