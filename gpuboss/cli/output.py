"""What commands print: tables for people, JSON for programs. And the ledger they look at.

Called by every command but `run`. rich is imported where a table is drawn on a terminal, and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuboss.settings import LedgerSettings

if TYPE_CHECKING:
    from gpuboss.client import Client

__all__ = ["connect", "print_json", "print_table", "settings_of"]


def settings_of(told: argparse.Namespace) -> LedgerSettings:
    """The ledger that the command line and the environment name. DeviceError for devices not understood."""
    return replace(LedgerSettings.from_environment(), state_dir=told.state_dir)


async def connect(told: argparse.Namespace) -> Client:
    """A client of that ledger, whose keeper is started if there is none."""
    from gpuboss.client import Client  # slow to import, and not needed for --help

    return await Client.connect(settings_of(told), name=f"gpuboss {told.what}", has_loop=True)


def print_json(value: Any) -> None:
    """A value for programs."""
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows for people; a column whose name begins with `>` is aligned to the right.

    Piped output has neither lines nor colours and is never wrapped, so that it can be cut and searched.
    """
    names = [column.removeprefix(">") for column in columns]
    to_right = [column.startswith(">") for column in columns]
    if not sys.stdout.isatty():
        _print_plain([names, *rows], to_right)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, (name, right) in enumerate(zip(names, to_right, strict=True)):
        # What the row is of comes first, and is never cut in two.
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def _print_plain(lines: Sequence[Sequence[str]], to_right: Sequence[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        ]
        print("  ".join(cells).rstrip())
