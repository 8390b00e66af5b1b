"""The command `gpuboss`: what devices there are, who holds them, who waits.

Entry point of the distribution's script. Calls `gpuboss.client`; needs nothing that the library does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuboss import errors
from gpuboss.leases import DeviceUse, Lease, LeaseState, Snapshot
from gpuboss.priority import name_of
from gpuboss.settings import LedgerSettings
from gpuboss.units import format_bytes

__all__ = ["main"]

_EPILOG = """\
examples:
  gpuboss devices                      what memory there is, and how much of it is free
  gpuboss ps                           who holds memory, and who waits for it
  gpuboss ps --json | jq '.[].holder'  the same for programs
  GPUBOSS_DEVICES=sim0=8GiB gpuboss devices
                                       try it on devices that are only declared

environment:
  GPUBOSS_STATE_DIR  where the ledger is kept (default: /var/lib/gpuboss where it exists, else ~/.local/state/gpuboss)
  GPUBOSS_DEVICES    devices to declare instead of those found, such as sim0=8GiB,sim1=24GiB
  GPUBOSS_URL        a Redis or Valkey that several hosts share (default: a private one on this host)

exit codes: 0 done, 1 the ledger cannot be used (the message says why), 2 wrong usage, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    told = _parser().parse_args(arguments)
    try:
        settings = replace(LedgerSettings.from_environment(), state_dir=told.state_dir)
        snapshot = asyncio.run(_snapshot(settings))
    except errors.GpubossError as error:
        print(f"gpuboss: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if told.command == "devices":
        _print(told.json, [_device_fields(use) for use in snapshot.devices], _device_lines(snapshot))
    else:
        _print(told.json, [_lease_fields(lease) for lease in snapshot.leases], _lease_lines(snapshot))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuboss",
        description="Leases on device memory: who may use how much of which device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("devices", "devices of this host: size, leased, observed, used by others, free"),
        ("ps", "leases: holders and waiters, in queue order"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
        command.add_argument("--state-dir", type=Path, help="as GPUBOSS_STATE_DIR")
    return parser


async def _snapshot(settings: LedgerSettings) -> Snapshot:
    from gpuboss.client import Client  # slow to import, and not needed for --help

    async with await Client.connect(settings, name="gpuboss command") as client:
        return await client.snapshot()


def _print(as_json: bool, fields: list[dict[str, Any]], lines: list[tuple[str, ...]]) -> None:
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _device_fields(use: DeviceUse) -> dict[str, Any]:
    device = use.device
    return {
        "id": device.id,
        "kind": device.kind.value,
        "name": device.name,
        "index": device.index,
        "measured": device.measured,
        "total_bytes": device.total_bytes,
        "reserve_bytes": device.reserve_bytes,
        "claimed_bytes": use.claimed_bytes,
        "observed_bytes": use.observed_bytes,
        "foreign_bytes": use.foreign_bytes,
        "residual_bytes": use.residual_bytes,
        "free_bytes": use.free_bytes,
    }


def _device_lines(snapshot: Snapshot) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        ("DEVICE", "KIND", "TOTAL", "RESERVE", "LEASED", "IN USE", "OTHERS", "FREE", "NAME")
    ]
    for use in snapshot.devices:
        device = use.device
        observed = "-" if use.observed_bytes is None else format_bytes(use.observed_bytes)
        others = format_bytes(use.foreign_bytes + use.residual_bytes) if device.measured else "-"
        sizes = (format_bytes(size) for size in (device.total_bytes, device.reserve_bytes, use.claimed_bytes))
        lines.append(
            (device.id, device.kind.value, *sizes, observed, others, format_bytes(use.free_bytes), device.name)
        )
    return lines


def _lease_fields(lease: Lease) -> dict[str, Any]:
    return {
        "id": lease.id,
        "holder": lease.holder,
        "kind": lease.kind.value,
        "state": lease.state.value,
        "priority": lease.priority,
        "shares": dict(lease.shares),
        "position": lease.position,
        "fence": None if lease.fence is None else [lease.fence.epoch, lease.fence.seq],
        "pid": lease.owner.pid,
        "since_ms": lease.since_ms,
    }


def _lease_lines(snapshot: Snapshot) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("LEASE", "HOLDER", "PRIORITY", "STATE", "SINCE", "PID", "MEMORY")]
    for lease in snapshot.leases:
        waiting = lease.state is LeaseState.QUEUED
        state = f"{lease.state} ({lease.position})" if waiting else lease.state.value
        memory = ", ".join(f"{device} {format_bytes(size)}" for device, size in sorted(lease.shares.items())) or "-"
        since = _ago(time.time() - lease.since_ms / 1000)
        lines.append((lease.id[:12], lease.holder, name_of(lease.priority), state, since, str(lease.owner.pid), memory))
    return lines


def _ago(seconds: float) -> str:
    """Rough age: `40s`, `12m`, `3h`, `2d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


if __name__ == "__main__":
    sys.exit(main())
