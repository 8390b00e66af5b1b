"""One node's devices and holders: read from the drivers, written into the node ledger, told to the store.

Called by `gpuboss.beats`; calls the probes (through `gpuboss.probing`), `gpuboss.accounts`, `gpuboss.node_ledger` and
the script `node_sync` (in the words of `gpuboss.telling`). The node ledger comes first and does not wait for the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuboss import errors, identity, processes, telling
from gpuboss.accounts import QUARANTINE_AFTER_S, Account, account
from gpuboss.devices import Device, Probe, Reading
from gpuboss.leases import Fence, LeaseState
from gpuboss.ledger_rows import Ground
from gpuboss.node_ledger import DeviceRow, LedgerRow, NodeLedger
from gpuboss.probing import PatientProbe
from gpuboss.scripts import Script
from gpuboss.store import Store
from gpuboss.sweep import StoredLease
from gpuboss.units import format_bytes
from gpuboss.wire import process_from_wire

__all__ = ["NodeWatch"]

_MOST_REREADS = 3
_log = logging.getLogger(__name__)


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
        self._measured = {device.id for device in self.devices if device.measured}
        self._probes = [PatientProbe(probe) for probe in probes]
        self._ledger = ledger
        self._told_ledger = {"id": ledger.identity(), "place": str(Path(ledger.path).parent)}
        self._memos: dict[str, dict[str, Any]] = {}
        """What the store said last of a lease's terms, kept for a store that forgets it."""
        self._silent: set[PatientProbe] = set()
        """Probes whose driver does not answer."""
        self._latest: dict[str, Account] = {}
        self._grounds: Mapping[str, tuple[Ground, ...]] = {}
        """What each row's admission rested on."""

    @property
    def silent(self) -> set[str]:
        """Devices whose driver does not answer: their last reading stands."""
        return {device.id for probe in self._silent for device in probe.devices}

    async def look(self) -> None:
        """Ask the drivers, then the ledger, and write down what is used by whom."""
        known = families(self._ledger.rows(), self._measured)
        readings = await self._read(sorted({pid for pids in known.values() for pid in pids}))
        # Read again: a row made since then must not find its memory counted as foreign.
        priors = self._ledger.priors()
        self._take_rows(self._ledger.rows())
        self._grounds = self._ledger.grounds()
        known |= families([row for row in self.rows if row.lease_id not in known], self._measured)
        seen = {pid for pids in known.values() for pid in pids}
        living = processes.living(seen.union(*(({*at.by_pid, *at.without_figure}) for at in readings)))
        accounts = account(readings, self.rows, known, living, priors)
        self._ledger.put_devices(self.devices, [each.reading for each in accounts])
        for each in accounts:
            self._note_quarantine(each)
            self._latest[each.reading.device_id] = each

    async def sync(self, store: Store) -> bool:
        """Tell the store; True when a new epoch began. Raises StoreUnavailable, StoreUnfit, LedgerConflict."""
        insist: set[str] = set()
        for _ in range(_MOST_REREADS):
            reply = await store.call_once(Script.NODE_SYNC, self._told(insist))
            if reply["status"] == "ok":
                break
            if reply["status"] == "conflict":
                raise errors.LedgerConflict(
                    f"the ledger in {reply['place']} speaks for node {self.node} in this store, and the one in "
                    f"{self._told_ledger['place']} is another: use one GPUBOSS_STATE_DIR for both, or a store "
                    f"(GPUBOSS_URL) of its own for each; one that has ended is forgotten within seconds"
                )
            # Leases that are over while their rows stood a moment ago: a row that stands still is the truth, unless
            # nothing but its holder's word stood behind it.
            await self.look()
            for row in [row for row in self.rows if row.lease_id in reply["ids"]]:
                if telling.is_by_word(row):
                    _log.info("lease %s of %s is over, says the store: its row goes", row.lease_id, row.holder)
                    self.remove(row)
                else:
                    insist.add(row.lease_id)
        else:
            raise errors.StoreUnavailable("rows of ended leases come and go: the node is synced at the next beat")
        self.leases = [self._remember(found) for found in reply["leases"]]
        self._forget_others()
        began: bool = reply["epoch"] != self.epoch
        if began:
            self.epoch = reply["epoch"]
            self._ledger.note_epoch(self.epoch)
        return began

    async def leave(self, store: Store) -> None:
        """Say that this ledger, if it has no rows, speaks for the node no more: another need not wait for that."""
        if self.standing():
            return
        told = self._told(set()) | {"ledger": self._told_ledger | {"leaves": True}}
        with contextlib.suppress(errors.GpubossError):
            await store.call_once(Script.NODE_SYNC, told)

    def close(self) -> None:
        """Ask the drivers no more."""
        for probe in self._probes:
            probe.close()

    def standing(self) -> set[str]:
        """The leases that have a row now, whatever the last look saw."""
        return {row.lease_id for row in self._ledger.rows()}

    def remove(self, row: LedgerRow) -> None:
        """Take out the row of a holder whose processes are all dead, or whose word is over."""
        self._ledger.remove(row.lease_id, row.epoch, row.seq)
        self._take_rows([other for other in self.rows if other.lease_id != row.lease_id])

    def _take_rows(self, rows: list[LedgerRow]) -> None:
        now = {row.lease_id for row in rows}
        self.vanished = (self.vanished | {row.lease_id for row in self.rows}) - now
        self.rows = rows

    async def _read(self, pids: Sequence[int]) -> list[Reading]:
        readings: list[Reading] = []
        for probe in self._probes:
            try:
                readings += await probe.read(pids)
                if probe in self._silent:
                    _log.warning("%s: the driver answers again", _names(probe))
                self._silent.discard(probe)
            except errors.DeviceError as error:
                if probe not in self._silent:  # once, not on every beat
                    _log.error("no reading of %s, the last one stands: %s", _names(probe), error)
                self._silent.add(probe)
        return readings

    def _note_quarantine(self, now: Account) -> None:
        """Log that a driver keeps memory, and that it has it back, once each."""
        device_id, size = now.reading.device_id, now.reading.quarantined_bytes
        before = self._latest.get(device_id)
        had = before.reading.quarantined_bytes if before else 0
        if size and not had:
            _log.error(
                "%s: %s of ended holders did not come back within %g s: quarantined until they do",
                *(device_id, format_bytes(size), QUARANTINE_AFTER_S),
            )
        elif had and not size:
            _log.warning("%s: what was quarantined (%s) is back", device_id, format_bytes(had))

    def _told(self, insist: set[str]) -> dict[str, Any]:
        return {
            "node": self.node,
            "seen_epoch": self.epoch,
            "ledger": self._told_ledger,
            "devices": {self._named(row.id): self._device_told(row) for row in self._ledger.devices()},
            "rows": [self._row_told(row, row.lease_id in insist) for row in self.rows],
        }

    def _device_told(self, row: DeviceRow) -> dict[str, Any]:
        latest = self._latest.get(row.id)
        return telling.device_told(row, latest.foreign if latest else (), is_silent=row.id in self.silent)

    def _row_told(self, row: LedgerRow, insist: bool) -> dict[str, Any]:
        readings = (latest.reading for latest in self._latest.values())
        observed = {at.device_id: at.observed[row.lease_id] for at in readings if row.lease_id in at.observed}
        memo = self._memos.get(row.lease_id, {})
        shares, grounds = self._all_named(row.shares), self._grounds.get(row.lease_id, ())
        return telling.row_told(row, memo, shares, self._all_named(observed), grounds) | {"insist": insist}

    def _remember(self, found: dict[str, Any]) -> StoredLease:
        fence = None
        if "epoch" in found:
            fence = Fence(found["epoch"], found["seq"])
            self._memos[found["id"]] = telling.only_terms(found)
        owner = process_from_wire(json.loads(found["owner"]))
        return StoredLease(found["id"], LeaseState(found["state"]), fence, owner)

    def _forget_others(self) -> None:
        stored = {lease.id for lease in self.leases}
        self.vanished &= stored
        wanted = stored | {row.lease_id for row in self.rows}
        self._memos = {lease_id: memo for lease_id, memo in self._memos.items() if lease_id in wanted}

    def _named(self, device_id: str) -> str:
        return f"{self.node}/{device_id}"

    def _all_named(self, shares: Mapping[str, int]) -> dict[str, int]:
        return {self._named(device_id): size for device_id, size in shares.items()}


def families(rows: Sequence[LedgerRow], measured: Collection[str]) -> dict[str, set[int]]:
    """Lease id -> its processes, as far as they can be seen from here.

    Those below the holder, and those below its engine (which is not below a holder that died). Where the holder's
    numbers are those of another pid namespace, or it has none, its processes are known by the lease that they carry, if
    at all; that takes a look at every process, so only for leases of devices that are `measured`.
    """
    here = identity.pid_namespace()
    found: dict[str, set[int]] = {row.lease_id: set() for row in rows}
    by_name = []
    for row in rows:
        if row.pid is not None and row.pid_namespace == here:
            found[row.lease_id] = processes.family(row.pid)
            if row.engine is not None:
                found[row.lease_id] |= processes.family(row.engine.pid)
        elif not row.shares.keys().isdisjoint(measured):
            by_name.append(row.lease_id)
    for lease_id, pids in processes.carriers(by_name).items() if by_name else ():
        found[lease_id] = {below for pid in pids for below in processes.family(pid)}
    return found


def _names(probe: PatientProbe) -> str:
    return ", ".join(device.id for device in probe.devices)
