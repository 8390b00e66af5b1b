"""`gpuboss events`: what happens to leases, line by line, until interrupted. Called by the package's `main`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict

from gpuboss.cli.exits import Exit
from gpuboss.cli.output import connect
from gpuboss.watching import LedgerEvent

__all__ = ["events", "line_of"]


def events(told: argparse.Namespace) -> int:
    """Print events as they happen."""
    asyncio.run(_follow(as_json=told.json, told=told))
    return Exit.DONE


async def _follow(*, as_json: bool, told: argparse.Namespace) -> None:
    async with await connect(told) as client, client.watch() as watch:
        if sys.stderr.isatty():
            print("following; Ctrl-C ends it", file=sys.stderr)
        async for event in watch:
            # Every line at once: whoever reads them waits for them.
            print(json.dumps(asdict(event)) if as_json else line_of(event), flush=True)


def line_of(event: LedgerEvent) -> str:
    """An event for people."""
    if event.what == "missed":
        return f"{_clock(time.time())}  missed     some events went unseen: `gpuboss ps` shows how things stand"
    at = _clock(event.at_ms / 1000)
    if event.what == "epoch":
        return f"{at}  epoch      the store began a new life"
    return f"{at}  {event.what:<9}  {event.lease_id}  {event.holder}".rstrip()


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
