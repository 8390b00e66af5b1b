"""`gpuboss node`: this host's keeper, its store, and what its node ledger says runs here.

Called by the package's `main`; `doctor` uses `Node` too.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuboss import errors
from gpuboss.cli import words
from gpuboss.cli.exits import Exit
from gpuboss.cli.output import connect, print_json, print_table
from gpuboss.client import Client
from gpuboss.host_lock import read_owner
from gpuboss.identity import Liveness
from gpuboss.leases import Snapshot
from gpuboss.ledger_rows import DeviceRow, LedgerRow
from gpuboss.node_ledger import NodeLedger
from gpuboss.store import Store
from gpuboss.store_url import shown
from gpuboss.units import format_bytes

__all__ = ["Node", "look", "node"]

_STALE_S = 15.0
"""A reading older than that, of a device that is measured, says that its driver does not answer."""
_ROW_COLUMNS = ("LEASE", "HOLDER", ">PID", "HOLDER IS", ">COMMAND", ">SINCE", "MEMORY")


@dataclass(frozen=True, slots=True)
class Node:
    """What there is to know of a host's ledger."""

    name: str
    """The host's, in the store."""
    keeper_pid: int | None
    keeper_age_s: float | None
    root: Path
    """The state directory."""
    store: str
    """Where it is, without passwords."""
    private: bool
    """Whether the keeper runs it for this host alone."""
    store_ms: float
    """How long it took to answer, milliseconds."""
    snapshot: Snapshot
    devices: tuple[DeviceRow, ...]
    """As the node ledger has them."""
    rows: tuple[LedgerRow, ...]
    store_warnings: tuple[str, ...]
    """What the store's owner should know, such as missing persistence."""
    faults: tuple[str, ...]
    """What in the store contradicts itself."""
    node_warnings: tuple[str, ...]
    """Of devices and rows."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """All of them, for people."""
        return (
            *self.store_warnings,
            *(f"the store contradicts itself: {one}" for one in self.faults),
            *self.node_warnings,
        )


def node(told: argparse.Namespace) -> int:
    """Print what there is to know of this host."""
    found = asyncio.run(_look(told))
    if told.json:
        print_json(_fields(found))
        return Exit.DONE
    age = "" if found.keeper_age_s is None else f", for {words.duration(found.keeper_age_s)}"
    print(f"node      {found.name}")
    print(f"keeper    process {found.keeper_pid or 'unknown'}{age}; log {found.root / 'log' / 'keeper.log'}")
    print(f"state     {found.root}")
    private = "private" if found.private else "shared"
    print(f"store     {private}, {found.store}; answered in {found.store_ms:.1f} ms")
    print(f"epoch     {found.snapshot.epoch}")
    print(f"rows      {len(found.rows)}")
    for warning in found.warnings or ("none",):
        print(f"warning   {warning}")
    if found.rows:
        print()
        ids = _short_ids(found.rows, found.snapshot)
        print_table(_ROW_COLUMNS, [_row_cells(row, ids[row.lease_id], found) for row in found.rows])
    return Exit.DONE


async def look(client: Client) -> Node:
    """Gather it. Raises StoreUnavailable, LedgerBusy, LedgerDamaged."""
    began_s = time.monotonic()
    snapshot = await client.snapshot()
    store_ms = (time.monotonic() - began_s) * 1000
    with NodeLedger(client.state.ledger_path) as books:
        rows, devices = tuple(books.rows()), tuple(books.devices())
    lock = client.state.lock_path("keeper")
    private = client.store_url == f"unix://{client.state.socket_path('store')}"
    return Node(
        name=client.node,
        keeper_pid=read_owner(lock).pid,
        keeper_age_s=time.time() - lock.stat().st_mtime if lock.exists() else None,
        root=client.state.root,
        store=shown(client.store_url),
        private=private,
        store_ms=store_ms,
        snapshot=snapshot,
        devices=devices,
        rows=rows,
        store_warnings=tuple(await _store_warnings(client)),
        faults=tuple(await client.audit()),
        node_warnings=(*_device_warnings(devices), *_row_warnings(rows, snapshot)),
    )


async def _look(told: argparse.Namespace) -> Node:
    async with await connect(told) as client:
        return await look(client)


async def _store_warnings(client: Client) -> list[str]:
    store = Store(client.store_url, client.timings)
    try:
        return list(await store.check_fitness())
    except errors.StoreUnfit as error:
        return [error.message]
    finally:
        await store.close()


def _device_warnings(devices: tuple[DeviceRow, ...]) -> list[str]:
    found = []
    now_s = time.monotonic()
    for device in devices:
        if device.quarantined_bytes:
            found.append(
                f"{device.id}: {format_bytes(device.quarantined_bytes)} of ended holders were not given back by the "
                "driver: quarantined until a reading shows them free"
            )
        if device.measured and device.read_at_s is not None and now_s - device.read_at_s > _STALE_S:
            found.append(
                f"{device.id}: its driver has not answered for {words.duration(now_s - device.read_at_s)}; "
                "the last reading stands"
            )
        if device.free_bytes < 0:
            over = format_bytes(-device.free_bytes)
            found.append(f"{device.id}: {over} more are in use than may be leased; nothing is granted on it")
    return found


def _row_warnings(rows: tuple[LedgerRow, ...], snapshot: Snapshot) -> list[str]:
    known = {lease.id for lease in snapshot.leases}
    ids = _short_ids(rows, snapshot)
    return [
        f"{row.holder} runs here under lease {ids[row.lease_id]}, which the store does not know yet"
        for row in rows
        if row.lease_id not in known
    ]


def _short_ids(rows: tuple[LedgerRow, ...], snapshot: Snapshot) -> dict[str, str]:
    return words.short_ids([*(row.lease_id for row in rows), *(lease.id for lease in snapshot.leases)])


def _fields(found: Node) -> dict[str, Any]:
    return {
        "node": found.name,
        "keeper_pid": found.keeper_pid,
        "keeper_age_s": found.keeper_age_s,
        "state_dir": str(found.root),
        "store": found.store,
        "private_store": found.private,
        "store_ms": found.store_ms,
        "epoch": found.snapshot.epoch,
        "warnings": list(found.warnings),
        "rows": [
            {
                "lease": row.lease_id,
                "holder": row.holder,
                "pid": row.pid,
                "alive": _liveness(row),
                "command_pid": row.engine_pid,
                "fence": [row.epoch, row.seq],
                "since_s": row.since_s,
                "shares": dict(row.shares),
            }
            for row in found.rows
        ],
    }


def _row_cells(row: LedgerRow, shown_id: str, found: Node) -> tuple[str, ...]:
    devices = [use.device for use in found.snapshot.devices]
    return (
        shown_id,
        row.holder,
        "-" if row.pid is None else str(row.pid),
        _liveness(row) or "held by word",
        "-" if row.engine_pid is None else str(row.engine_pid),
        words.ago(int(row.since_s * 1000)),
        words.shares(row.shares, devices),
    )


def _liveness(row: LedgerRow) -> str | None:
    """`alive`, `dead` or `unknown`; None for a lease without a process."""
    if row.process is None:
        return None
    seen: Liveness = row.process.is_alive()
    return str(seen.value)
