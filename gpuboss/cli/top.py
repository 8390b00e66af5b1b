"""`gpuboss top`: devices with bars, and leases, kept up to date. Called by the package's `main`.

The picture is made from one snapshot (`picture`); `_live` puts it on the terminal until q or Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuboss import errors
from gpuboss.cli import words
from gpuboss.cli.exits import Exit
from gpuboss.cli.output import connect, print_json
from gpuboss.cli.views import LEASE_COLUMNS, Pids, lease_rows, look, snapshot_of
from gpuboss.client import Client
from gpuboss.leases import DeviceUse, LeaseState, Snapshot
from gpuboss.units import format_bytes

__all__ = ["picture", "segments", "top"]

_LONGEST_BAR, _SHORTEST_BAR = 40, 20
"""Characters of a bar: as many as the figures beside it leave; where that is too few, the figures are wrapped."""
_UNBROKEN = ("LEASE", "SINCE", "PID")
"""What is never cut in two: half an id or number names something else."""
_STYLES = {
    "used": ("green", "█"),
    "leased": ("green", "▒"),
    "others": ("yellow", "#"),
    "leftover": ("red", "!"),
    "reserve": ("bright_black", "░"),
    "free": ("bright_black", "·"),
}
"""Colour and character of each part of a bar; the characters alone tell them apart too."""
_SHORTEST_INTERVAL_S = 0.1


def top(told: argparse.Namespace) -> int:
    """Show the ledger."""
    return asyncio.run(_top(told))


async def _top(told: argparse.Namespace) -> int:
    async with await connect(told) as client:
        if told.json:
            print_json(snapshot_of(*await look(client)))
        elif told.once or not sys.stdout.isatty():
            console = Console(markup=False, highlight=False)
            console.print(picture(*await look(client), console.width))
        else:
            await _live(client, max(_SHORTEST_INTERVAL_S, told.interval))
    return Exit.DONE


async def _live(client: Client, interval_s: float) -> None:
    leave = asyncio.Event()
    console = Console(markup=False, highlight=False)
    with _keys(leave), Live(console=console, screen=True, auto_refresh=False) as live:
        while not leave.is_set():
            try:
                shown = picture(*await look(client), console.width)
            except errors.GpubossError as error:
                shown = Group(Text(error.message, style="red"))
            live.update(shown, refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await leave.wait()


@contextlib.contextmanager
def _keys(leave: asyncio.Event) -> Iterator[None]:
    """Hear single keys while the picture stands; `leave` is set at q."""
    handle = sys.stdin.fileno()
    if not os.isatty(handle):
        yield
        return
    before = termios.tcgetattr(handle)
    loop = asyncio.get_running_loop()

    def hear() -> None:
        if os.read(handle, 64)[:1] in (b"q", b"Q", b"\x1b", b""):
            leave.set()

    tty.setcbreak(handle)
    loop.add_reader(handle, hear)
    try:
        yield
    finally:
        loop.remove_reader(handle)
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def picture(snapshot: Snapshot, pids: Pids, width: int) -> Group:
    """The whole screen, of so many characters to a line."""
    leases = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in LEASE_COLUMNS:
        name = column.removeprefix(">")
        justify: JustifyMethod = "left" if name == column else "right"
        leases.add_column(name, justify=justify, overflow="fold", no_wrap=name in _UNBROKEN)
    for lease, cells in zip(snapshot.leases, lease_rows(snapshot, pids), strict=True):
        leases.add_row(*cells, style="dim" if lease.state is LeaseState.QUEUED else "")
    waiting = sum(lease.state is LeaseState.QUEUED for lease in snapshot.leases)
    held = len(snapshot.leases) - waiting
    head = Text(f"gpuboss  {time.strftime('%H:%M:%S')}  {held} held, {waiting} waiting  (q leaves)", style="bold")
    strangers = [Text(line, style="yellow") for line in words.foreign(snapshot.devices)]
    return Group(head, Text(), _devices(snapshot.devices, width), _legend(), *strangers, Text(), leases)


def _devices(uses: Sequence[DeviceUse], width: int) -> Table:
    cells = [(words.device_name(use.device), _percent(use), _figures(use)) for use in uses]
    others = [max(map(len, column), default=0) + 1 for column in zip(*cells, strict=True)]
    bar = min(_LONGEST_BAR, max(_SHORTEST_BAR, width - sum(others) - 1))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    for use, (name, percent, figures) in zip(uses, cells, strict=True):
        table.add_row(name, _bar(use, bar), percent, figures)
    return table


def segments(use: DeviceUse, width: int) -> list[tuple[str, int]]:
    """A device's memory as parts of a bar: (part, characters), together exactly `width`.

    Used and leased are of the leases (leased: claimed and not used yet), leftover is residual and quarantine.
    """
    total = use.device.total_bytes
    observed = use.claimed_bytes if use.observed_bytes is None else use.observed_bytes
    sizes = [
        ("used", observed),
        ("leased", max(0, use.claimed_bytes - observed)),
        ("others", use.foreign_bytes),
        ("leftover", use.residual_bytes),
        ("reserve", use.device.reserve_bytes),
    ]
    found: list[tuple[str, int]] = []
    begin, drawn = 0, 0
    for part, size in sizes:
        begin += size
        # Rounded at the boundaries, not piece by piece: so the pieces fill the bar and never exceed it.
        until = min(width, round(begin * width / total)) if total else 0
        found.append((part, max(0, until - drawn)))
        drawn = max(drawn, until)
    return [*found, ("free", width - drawn)]


def _bar(use: DeviceUse, width: int) -> Text:
    bar = Text()
    for part, count in segments(use, width):
        style, character = _STYLES[part]
        bar.append(character * count, style)
    return bar


def _percent(use: DeviceUse) -> str:
    total = use.device.total_bytes - use.device.reserve_bytes
    return f"{100 * (total - use.free_bytes) / total:.0f}%" if total > 0 else "-"


def _figures(use: DeviceUse) -> str:
    told = [f"{format_bytes(max(0, use.free_bytes))} of {format_bytes(use.device.total_bytes)} free"]
    for what, size in (
        ("leased", use.claimed_bytes),
        ("in use", use.observed_bytes or 0),
        ("others", use.foreign_bytes),
        ("leftovers", use.residual_bytes - use.quarantined_bytes),
        ("quarantined", use.quarantined_bytes),
    ):
        if size > 0:
            told.append(f"{what} {format_bytes(size)}")
    return ", ".join(told)


def _legend() -> Text:
    legend = Text()
    for part, (style, character) in _STYLES.items():
        legend.append(character, style)
        legend.append(f" {part}  ", "dim")
    return legend
