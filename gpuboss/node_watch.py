"""One node's devices and holders: read from the drivers, written into the node ledger, told to the store.

Called by `gpuboss.keeper` on every beat; calls the probes, `gpuboss.node_ledger` and the script `node_sync`. The node
ledger comes first and does not wait for the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuboss import errors, processes
from gpuboss.accounts import account
from gpuboss.devices import Device, DeviceKind, Probe, Reading
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, HolderKind, LeaseState
from gpuboss.node_ledger import DeviceRow, LedgerReading, LedgerRow, NodeLedger
from gpuboss.priority import NORMAL
from gpuboss.scripts import Script
from gpuboss.store import Store
from gpuboss.sweep import StoredLease
from gpuboss.wire import process_from_wire, process_to_wire

__all__ = ["NodeWatch"]

_MOST_REREADS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Memo:
    """What the node ledger does not record of a lease, kept for a store that forgets it."""

    kind: str
    priority: int
    owner: ProcessIdentity


class NodeWatch:
    """The keeper's eyes and books."""

    def __init__(self, node: str, probes: Sequence[Probe], ledger: NodeLedger) -> None:
        self.node = node
        """The node's name in the store."""
        self.devices: tuple[Device, ...] = tuple(device for probe in probes for device in probe.devices())
        self.rows: list[LedgerRow] = []
        """The node ledger's rows at the last look."""
        self.vanished: set[str] = set()
        """Leases whose rows were here and are gone, until the store has freed them."""
        self.leases: list[StoredLease] = []
        """The store's leases of this node at the last sync."""
        self.epoch = ledger.highest_epoch()
        self._probes = probes
        self._ledger = ledger
        self._memos: dict[str, _Memo] = {}
        self._silent: set[str] = set()
        """Probes whose driver does not answer."""
        self._latest: dict[str, LedgerReading] = {}

    def look(self) -> None:
        """Ask the drivers, then the ledger, and write down what is used by whom."""
        known = {row.lease_id: _family_of(row) for row in self._ledger.rows()}
        readings = self._read(sorted({pid for pids in known.values() for pid in pids}))
        # Read again: a row made since then must not find its memory counted as foreign.
        self._take_rows(self._ledger.rows())
        families = {row.lease_id: known.get(row.lease_id) or _family_of(row) for row in self.rows}
        accounts = account(readings, self.rows, families)
        self._ledger.put_devices(self.devices, accounts)
        self._latest |= {reading.device_id: reading for reading in accounts}

    async def sync(self, store: Store) -> bool:
        """Tell the store; True when a new epoch began. Raises StoreUnavailable, StoreUnfit."""
        insist: set[str] = set()
        for _ in range(_MOST_REREADS):
            reply = await store.call_once(Script.NODE_SYNC, self._told(insist))
            if reply["status"] == "ok":
                break
            # Leases that are over while their rows stood a moment ago: a row that stands still is the truth.
            self.look()
            insist |= set(reply["ids"]) & {row.lease_id for row in self.rows}
        else:
            raise errors.StoreUnavailable("rows of ended leases come and go: the node is synced at the next beat")
        self.leases = [self._remember(found) for found in reply["leases"]]
        self._forget_others()
        began: bool = reply["epoch"] != self.epoch
        if began:
            self.epoch = reply["epoch"]
            self._ledger.note_epoch(self.epoch)
        return began

    def remove(self, row: LedgerRow) -> None:
        """Take out the row of a holder whose processes are all dead."""
        self._ledger.remove(row.lease_id, row.epoch, row.seq)
        self._take_rows([other for other in self.rows if other.lease_id != row.lease_id])

    def _take_rows(self, rows: list[LedgerRow]) -> None:
        now = {row.lease_id for row in rows}
        self.vanished = (self.vanished | {row.lease_id for row in self.rows}) - now
        self.rows = rows

    def _read(self, pids: Sequence[int]) -> list[Reading]:
        readings: list[Reading] = []
        for probe in self._probes:
            name = type(probe).__name__
            try:
                readings += probe.read(pids)
                self._silent.discard(name)
            except errors.DeviceError as error:
                if name not in self._silent:  # once, not on every beat
                    _log.error("no reading, the last one stands: %s", error)
                self._silent.add(name)
        return readings

    def _told(self, insist: set[str]) -> dict[str, Any]:
        by_device = {row.id: row for row in self._ledger.devices()}
        return {
            "node": self.node,
            "seen_epoch": self.epoch,
            "devices": {self._named(name): _device_told(row) for name, row in by_device.items()},
            "rows": [self._row_told(row, row.lease_id in insist) for row in self.rows],
        }

    def _row_told(self, row: LedgerRow, insist: bool) -> dict[str, Any]:
        memo = self._memos.get(row.lease_id) or _Memo(_kind_of(row.holder), NORMAL, row.process)
        readings = self._latest.values()
        observed = {at.device_id: at.observed[row.lease_id] for at in readings if row.lease_id in at.observed}
        return {
            "id": row.lease_id,
            "holder": row.holder,
            "kind": memo.kind,
            "priority": memo.priority,
            "owner": json.dumps(process_to_wire(memo.owner)),
            "epoch": row.epoch,
            "seq": row.seq,
            "shares": json.dumps({self._named(name): size for name, size in row.shares.items()}),
            "observed": json.dumps({self._named(name): size for name, size in observed.items()}),
            "insist": insist,
        }

    def _remember(self, found: dict[str, Any]) -> StoredLease:
        owner = process_from_wire(json.loads(found["owner"]))
        self._memos[found["id"]] = _Memo(found["kind"], found["priority"], owner)
        fence = Fence(found["epoch"], found["seq"]) if "epoch" in found else None
        return StoredLease(found["id"], LeaseState(found["state"]), fence, owner)

    def _forget_others(self) -> None:
        stored = {lease.id for lease in self.leases}
        self.vanished &= stored
        wanted = stored | {row.lease_id for row in self.rows}
        self._memos = {lease_id: memo for lease_id, memo in self._memos.items() if lease_id in wanted}

    def _named(self, device_id: str) -> str:
        return f"{self.node}/{device_id}"


def _family_of(row: LedgerRow) -> set[int]:
    """The holder's processes: those below it, and those below its engine (which is not below a holder that died)."""
    engine = row.engine
    return processes.family(row.pid) | (processes.family(engine.pid) if engine is not None else set())


def _device_told(row: DeviceRow) -> dict[str, Any]:
    return {
        "total": row.total_bytes,
        "reserve": row.reserve_bytes,
        "foreign": row.foreign_bytes,
        "residual": row.residual_bytes + row.settling_bytes,
        # Host RAM is back before a dead process can be waited for; a GPU's driver takes its time.
        "settles": row.measured and row.kind != DeviceKind.CPU,
    }


def _kind_of(holder: str) -> str:
    """The holder's kind, from its name (`slot:robin`), for a lease that no store remembers."""
    prefix = holder.partition(":")[0]
    return prefix if prefix in set(HolderKind) else HolderKind.JOB
