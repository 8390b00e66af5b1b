"""`gpuboss devices` and `gpuboss ps`: one look at the ledger.

Called by the package's `main`; `top` uses the same columns, and whoever prints a lease the same fields.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from gpuboss.cli import words
from gpuboss.cli.exits import Exit
from gpuboss.cli.output import connect, print_json, print_table
from gpuboss.client import Client
from gpuboss.leases import DeviceUse, Lease, LeaseState, Snapshot
from gpuboss.ledger_rows import Ground
from gpuboss.node_ledger import NodeLedger
from gpuboss.priority import name_of
from gpuboss.units import format_bytes

__all__ = [
    *("LEASE_COLUMNS", "Pids", "device_fields", "devices", "lease_fields", "lease_rows", "look", "pids_of", "ps"),
    "snapshot_of",
]

Pids = Mapping[str, int | None]
"""Lease id -> its process in this node's books; None for one that is held by word, missing before it is used."""

_DEVICE_COLUMNS = (
    *("DEVICE", "KIND", ">TOTAL", ">RESERVE", ">LEASED", ">IN USE", ">OTHERS", ">QUARANTINED", ">FREE", "NAME"),
)
LEASE_COLUMNS = ("LEASE", "HOLDER", "PRIORITY", "STATE", ">SINCE", ">PID", "MEMORY")


def devices(told: argparse.Namespace) -> int:
    """Print the devices."""
    uses = asyncio.run(_look(told))[0].devices
    if told.json:
        print_json([device_fields(use) for use in uses])
        return Exit.DONE
    print_table(_DEVICE_COLUMNS, [_device_cells(use) for use in uses])
    if strangers := words.foreign(uses):
        print("\n" + "\n".join(strangers) + "\n`gpuboss adopt --pid PID` gives such a process a lease.")
    return Exit.DONE


def ps(told: argparse.Namespace) -> int:
    """Print the leases."""
    snapshot, pids = asyncio.run(_look(told))
    if told.json:
        print_json([lease_fields(lease, pids) for lease in snapshot.leases])
        return Exit.DONE
    print_table(LEASE_COLUMNS, lease_rows(snapshot, pids))
    return Exit.DONE


async def look(client: Client) -> tuple[Snapshot, Pids]:
    """The ledger, and which processes its leases are of. Raises StoreUnavailable, LedgerBusy, LedgerDamaged."""
    return await client.snapshot(), pids_of(client)


def pids_of(client: Client) -> Pids:
    """Which processes the leases are of. Raises LedgerBusy, LedgerDamaged."""
    with NodeLedger(client.state.ledger_path) as books:
        return {row.lease_id: row.pid for row in books.rows()}


async def _look(told: argparse.Namespace) -> tuple[Snapshot, Pids]:
    async with await connect(told) as client:
        return await look(client)


def snapshot_of(snapshot: Snapshot, pids: Pids) -> dict[str, Any]:
    """A whole snapshot for JSON."""
    return {
        "epoch": snapshot.epoch,
        "devices": [device_fields(use) for use in snapshot.devices],
        "leases": [lease_fields(lease, pids) for lease in snapshot.leases],
    }


def device_fields(use: DeviceUse) -> dict[str, Any]:
    """A device for JSON."""
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
        "foreign_pids": [{"pid": found.pid, "name": found.name, "bytes": found.bytes} for found in use.foreign_pids],
        "residual_bytes": use.residual_bytes,
        "quarantined_bytes": use.quarantined_bytes,
        "free_bytes": use.free_bytes,
    }


def lease_fields(lease: Lease, pids: Pids) -> dict[str, Any]:
    """A lease for JSON."""
    notice = lease.notice
    return {
        "id": lease.id,
        "holder": lease.holder,
        "kind": lease.kind.value,
        "state": lease.state.value,
        "priority": lease.priority,
        "shares": dict(lease.shares),
        "wants": dict(lease.wants),
        "position": lease.position,
        "preemptible": lease.preemptible,
        "grace_s": lease.grace_s,
        "ttl_s": lease.ttl_s,
        "notice": None
        if notice is None
        else {
            "by": notice.by,
            "holder": notice.holder,
            "priority": notice.priority,
            "since_ms": notice.since_ms,
            "left_s": notice.left_s,
            "acknowledged": notice.acknowledged,
        },
        "fence": None if lease.fence is None else [lease.fence.epoch, lease.fence.seq],
        "node": lease.node,
        "pid": _pid(lease, pids),
        "grounds": [{name: getattr(ground, name) for name in Ground.__slots__} for ground in lease.grounds],
        "since_ms": lease.since_ms,
    }


def lease_rows(snapshot: Snapshot, pids: Pids) -> list[tuple[str, ...]]:
    """The leases' rows under LEASE_COLUMNS."""
    ids = words.short_ids(lease.id for lease in snapshot.leases)
    return [_lease_cells(lease, ids[lease.id], snapshot.devices, pids) for lease in snapshot.leases]


def _lease_cells(lease: Lease, shown_id: str, uses: Iterable[DeviceUse], pids: Pids) -> tuple[str, ...]:
    importance = "pinned" if words.is_pinned(lease) else name_of(lease.priority)
    preemptible = " (yields)" if lease.preemptible and not words.is_pinned(lease) else ""
    pid = _pid(lease, pids)
    return (
        shown_id,
        lease.holder,
        f"{importance}{preemptible}",
        _state(lease),
        words.ago(lease.since_ms),
        "-" if pid is None else str(pid),
        words.memory(lease, [use.device for use in uses]),
    )


def _pid(lease: Lease, pids: Pids) -> int | None:
    """Whose memory it is; as long as it is nobody's, who asked."""
    return pids.get(lease.id, lease.owner.pid)


def _state(lease: Lease) -> str:
    if lease.state is LeaseState.QUEUED:
        return f"{lease.state} ({lease.position})"
    if lease.notice is not None:
        who = lease.notice.holder or "a person"
        return f"{lease.state}, to yield to {who} in {max(0.0, lease.notice.left_s):.0f}s"
    return lease.state.value


def _device_cells(use: DeviceUse) -> tuple[str, ...]:
    device = use.device
    name = words.device_name(device)
    sizes = [format_bytes(size) for size in (device.total_bytes, device.reserve_bytes, use.claimed_bytes)]
    return (
        name,
        device.kind.value,
        *sizes,
        "-" if use.observed_bytes is None else format_bytes(use.observed_bytes),
        format_bytes(use.foreign_bytes + use.residual_bytes - use.quarantined_bytes) if device.measured else "-",
        format_bytes(use.quarantined_bytes) if device.measured else "-",
        format_bytes(use.free_bytes),
        device.name if name == device.id else f"{device.name} {device.id}",
    )
