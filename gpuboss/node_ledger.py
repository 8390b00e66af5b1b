"""What runs on this node, whatever the lease store believes: the book that every use of a device is entered in first.

Before a process uses a device, a row is written here in one transaction that first checks that the memory is there:

    effective free = total - reserve - foreign - residual - sum over rows of max(claimed, observed)

So memory is never given twice even when the store forgets, answers twice, or rolls back. Called by the shim (`admit`,
`set_engine`, `remove`) between a request and its engine, and by the keeper (`put_devices`, `rows`, `remove`).

- Evidence first: a row counts until it is removed, also when its process is dead. Where a GPU's driver measures,
  removing it does not make the memory free at once: what the row counted for is "settling" until a reading taken
  after the removal tells whether the driver has it back.
- One SQLite file per boot. It is never synced to the disk: device memory does not outlive a power cut, so neither
  need the file; and the kernel keeps written pages when a process is killed.
- Standard library only, and light: see `gpuboss.light`.
"""

from __future__ import annotations

import os
import time

from gpuboss import errors
from gpuboss.ledger_file import Transaction, open_file
from gpuboss.ledger_rows import DeviceRow, LedgerReading, LedgerRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from gpuboss.devices import Device

__all__ = ["DeviceRow", "LedgerReading", "LedgerRow", "NodeLedger"]

_USE = """
SELECT d.id, d.kind, d.name, d.idx, d.measured, d.total_bytes, d.reserve_bytes, d.foreign_bytes, d.residual_bytes,
    d.read_at_s, coalesce(s.claimed, 0), s.observed, coalesce(t.settling, 0),
    d.total_bytes - d.reserve_bytes - d.foreign_bytes - d.residual_bytes - coalesce(t.settling, 0) - coalesce(s.held, 0)
FROM device d
LEFT JOIN (
    SELECT device_id, sum(claimed_bytes) AS claimed, sum(observed_bytes) AS observed,
        sum(max(claimed_bytes, coalesce(observed_bytes, 0))) AS held
    FROM share GROUP BY device_id
) s ON s.device_id = d.id
LEFT JOIN (SELECT device_id, sum(bytes) AS settling FROM settling GROUP BY device_id) t ON t.device_id = d.id
"""


class NodeLedger:
    """The node's book; one connection, for one thread of one process, opened anew after a fork."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, or make it. Raises StateDirError, LedgerBusy, LedgerDamaged."""
        self.path = os.fspath(path)
        self._db = open_file(self.path)

    def admit(self, row: LedgerRow) -> None:
        """Enter a row if every share fits, or raise ActivationRefused and write nothing.

        Entering the same row again (lease, fence, process, shares) changes nothing. StaleFence: this lease has a row
        with another fence, or another process holds it already.
        """
        with self._transaction():
            if not self._is_repeated(row):
                self._check_room(row)
                self._insert(row)

    def set_engine(self, lease_id: str, pid: int, start_ticks: int) -> None:
        """Record the engine that the lease's holder started; StaleFence when the lease has no row."""
        with self._transaction():
            done = self._db.execute(
                "UPDATE holder SET engine_pid = ?, engine_start_ticks = ? WHERE lease_id = ?",
                (pid, start_ticks, lease_id),
            )
            if done.rowcount == 0:
                raise errors.StaleFence(f"lease {lease_id} has no row in {self.path}: its engine {pid} is not recorded")

    def remove(self, lease_id: str, epoch: int, seq: int) -> bool:
        """Take out the row of this lease and fence, after its processes are dead; False when there is none such.

        What it counted for on a GPU that is measured is settling from now until the next reading.
        """
        with self._transaction():
            fence = (lease_id, epoch, seq)
            if not self._db.execute("DELETE FROM holder WHERE lease_id = ? AND epoch = ? AND seq = ?", fence).rowcount:
                return False
            # Host RAM is given back before a dead process can be waited for, so `cpu` has nothing to settle.
            self._db.execute(
                "INSERT INTO settling "
                "SELECT s.device_id, max(s.claimed_bytes, coalesce(s.observed_bytes, 0)), ? "
                "FROM share s JOIN device d ON d.id = s.device_id "
                "WHERE s.lease_id = ? AND d.measured AND d.kind <> 'cpu'",
                (time.monotonic(), lease_id),
            )
            self._db.execute("DELETE FROM share WHERE lease_id = ?", (lease_id,))
            return True

    def rows(self) -> list[LedgerRow]:
        """All rows, oldest first, whether or not their processes live."""
        with self._transaction(write=False):
            shares: dict[str, dict[str, int]] = {}
            for lease_id, device_id, claimed in self._db.execute(
                "SELECT lease_id, device_id, claimed_bytes FROM share"
            ):
                shares.setdefault(lease_id, {})[device_id] = claimed
            holders = self._db.execute(
                "SELECT lease_id, epoch, seq, holder, pid, start_ticks, pid_namespace, "
                "engine_pid, engine_start_ticks, since_s FROM holder ORDER BY since_s, lease_id"
            )
            return [_ledger_row(found, shares.get(found[0], {})) for found in holders]

    def put_devices(self, devices: Iterable[Device], readings: Iterable[LedgerReading] = ()) -> None:
        """Make these the node's devices, and enter the latest readings.

        Read the drivers first and `rows()` after: a row admitted in between is then known, and its memory is not
        taken for foreign. A device without a reading keeps its last one. What settled before a reading is forgotten:
        it is in that reading, as free, foreign or residual.
        """
        with self._transaction():
            self._put_devices(list(devices))
            for reading in readings:
                self._put_reading(reading)

    def devices(self) -> list[DeviceRow]:
        """All devices with their numbers, in index order."""
        with self._transaction(write=False):
            return [DeviceRow(*found) for found in self._db.execute(_USE + " ORDER BY d.idx, d.id")]

    def note_epoch(self, epoch: int) -> None:
        """Remember that the store lived in this epoch."""
        with self._transaction():
            self._note_epoch(epoch)

    def highest_epoch(self) -> int:
        """The highest epoch this node saw, in rows or by `note_epoch`; 0 before the first."""
        with self._transaction(write=False):
            found = self._db.execute("SELECT value FROM mark WHERE name = 'epoch'").fetchone()
            return int(found[0]) if found else 0

    def close(self) -> None:
        """Close the file; the rows stay."""
        self._db.close()

    def __enter__(self) -> NodeLedger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _transaction(self, *, write: bool = True) -> Transaction:
        return Transaction(self._db, self.path, write=write)

    def _is_repeated(self, row: LedgerRow) -> bool:
        """Whether exactly this row stands already; StaleFence when the lease stands with another fence or process."""
        found = self._db.execute(
            "SELECT epoch, seq, pid, start_ticks, pid_namespace FROM holder WHERE lease_id = ?", (row.lease_id,)
        ).fetchone()
        if found is None:
            return False
        epoch, seq, pid, start_ticks, namespace = found
        if (epoch, seq) != (row.epoch, row.seq):
            raise errors.StaleFence(
                f"lease {row.lease_id} of {row.holder} runs with fence ({epoch}, {seq}): "
                f"({row.epoch}, {row.seq}) is refused"
            )
        if (pid, start_ticks, namespace) != (row.pid, row.start_ticks, row.pid_namespace):
            raise errors.StaleFence(
                f"lease {row.lease_id} of {row.holder} is held by process {pid}: process {row.pid} is refused"
            )
        shares = dict(
            self._db.execute("SELECT device_id, claimed_bytes FROM share WHERE lease_id = ?", (row.lease_id,))
        )
        if shares != row.shares:
            raise errors.StaleFence(
                f"lease {row.lease_id} of {row.holder} has shares {shares}: {dict(row.shares)} is refused"
            )
        return True

    def _check_room(self, row: LedgerRow) -> None:
        """Raise ActivationRefused unless every share fits its device's effective free."""
        for device_id, wanted in sorted(row.shares.items()):
            if wanted < 0:
                raise ValueError(f"lease {row.lease_id} wants {wanted} bytes of {device_id}")
            found = self._db.execute(_USE + " WHERE d.id = ?", (device_id,)).fetchone()
            if found is None:
                raise errors.ActivationRefused(
                    device_id,
                    wanted_bytes=wanted,
                    free_bytes=0,
                    detail="; no such device in this node's ledger: is the keeper up?",
                )
            device = DeviceRow(*found)
            if wanted > device.free_bytes:
                raise self._refusal(device, wanted)

    def _refusal(self, device: DeviceRow, wanted: int) -> errors.ActivationRefused:
        holders = self._db.execute(
            "SELECT h.holder, max(s.claimed_bytes, coalesce(s.observed_bytes, 0)) AS held FROM share s "
            "JOIN holder h USING (lease_id) WHERE s.device_id = ? ORDER BY held DESC",
            (device.id,),
        ).fetchall()
        if device.foreign_bytes:
            holders.append(("processes without a lease", device.foreign_bytes))
        if device.residual_bytes:
            holders.append(("holders beyond or after their leases", device.residual_bytes))
        return errors.ActivationRefused(
            device.id,
            wanted_bytes=wanted,
            free_bytes=device.free_bytes,
            settling_bytes=device.settling_bytes,
            holders=sorted(holders, key=lambda held: -held[1]),
        )

    def _insert(self, row: LedgerRow) -> None:
        self._note_epoch(row.epoch)
        self._db.execute(
            "INSERT INTO holder VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(row.lease_id, row.epoch, row.seq, row.holder),
                *(row.pid, row.start_ticks, row.pid_namespace),
                *(row.engine_pid, row.engine_start_ticks, row.since_s),
            ),
        )
        self._db.executemany(
            "INSERT INTO share VALUES (?, ?, ?, NULL)",
            [(row.lease_id, device, size) for device, size in row.shares.items()],
        )

    def _note_epoch(self, epoch: int) -> None:
        self._db.execute(
            "INSERT INTO mark VALUES ('epoch', ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
            (epoch,),
        )

    def _put_devices(self, devices: Sequence[Device]) -> None:
        known = {found[0] for found in self._db.execute("SELECT id FROM device")}
        for gone in known - {device.id for device in devices}:
            self._db.execute("DELETE FROM device WHERE id = ?", (gone,))
        self._db.executemany(
            "INSERT INTO device (id, kind, name, idx, measured, total_bytes, reserve_bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, name = excluded.name, idx = excluded.idx, "
            "measured = excluded.measured, total_bytes = excluded.total_bytes, reserve_bytes = excluded.reserve_bytes",
            [(d.id, str(d.kind), d.name, d.index, d.measured, d.total_bytes, d.reserve_bytes) for d in devices],
        )

    def _put_reading(self, reading: LedgerReading) -> None:
        self._db.execute(
            "UPDATE device SET foreign_bytes = ?, residual_bytes = ?, read_at_s = ? WHERE id = ?",
            (reading.foreign_bytes, reading.residual_bytes, reading.at_s, reading.device_id),
        )
        self._db.execute("UPDATE share SET observed_bytes = NULL WHERE device_id = ?", (reading.device_id,))
        self._db.executemany(
            "UPDATE share SET observed_bytes = ? WHERE lease_id = ? AND device_id = ?",
            [(size, lease_id, reading.device_id) for lease_id, size in reading.observed.items()],
        )
        self._db.execute("DELETE FROM settling WHERE device_id = ? AND since_s < ?", (reading.device_id, reading.at_s))


def _ledger_row(found: tuple[Any, ...], shares: Mapping[str, int]) -> LedgerRow:
    lease_id, epoch, seq, holder, *process = found
    return LedgerRow(lease_id, epoch, seq, holder, shares, *process)
