"""What runs on this node, whatever the lease store believes: the book that every use of a device is entered in first.

Before a process uses a device, a row is written here in one transaction that first checks that the memory is there:

    effective free = total - reserve - foreign - residual - sum over rows of max(claimed, observed)

So memory is never given twice even when the store forgets, answers twice, or rolls back. Called by the shim (`admit`,
`set_engine`, `remove`) between a request and its engine, by the client for holders of other sorts (`resize` too), and
by the keeper (`put_devices`, `priors`, `rows`, `remove`). The SQL of devices and readings is in `ledger_readings`, that
of what admissions rested on in `ledger_grounds`.

- Evidence first: a row counts until it is removed, also when its process is dead. Where the device is measured,
  removing it does not make the memory free at once: what the row counted for is "settling" until a reading taken
  after the removal tells what is in use. On a GPU it is a debt of the ended holder until the driver has it back.
- What each admission rested on is kept as long as its row: what was free, how old the reading was, who had ended.
- Where the driver gives no figures per process, one holder begins at a time: until a reading has seen it, nobody can
  say whose the memory is that it takes.
- One SQLite file per boot. It is never synced to the disk: device memory does not outlive a power cut, so neither
  need the file; and the kernel keeps written pages when a process is killed.
- Standard library only, and light: see `gpuboss.light`.
"""

from __future__ import annotations

import os
import time

from gpuboss import errors, ledger_grounds, ledger_readings
from gpuboss.ledger_file import Transaction, open_file
from gpuboss.ledger_rows import DeviceRow, Ground, LedgerReading, LedgerRow, Prior, SharePeak

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from gpuboss.devices import Device

__all__ = ["DeviceRow", "LedgerReading", "LedgerRow", "NodeLedger"]


class NodeLedger:
    """The node's book; one connection, for one thread of one process, opened anew after a fork."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, or make it. Raises StateDirError, LedgerBusy, LedgerDamaged."""
        self.path = os.fspath(path)
        self._db = open_file(self.path)

    def admit(self, row: LedgerRow, adopts: Mapping[str, int] | None = None) -> None:
        """Enter a row if every share fits, or raise ActivationRefused and write nothing.

        `adopts`: device id -> bytes that the holder uses already and that count as foreign until now; they count as its
        own from here on. Entering the same row again (lease, fence, process, shares) changes nothing. StaleFence: this
        lease has a row with another fence, or another process holds it already.
        """
        with self._transaction():
            if not self._is_repeated(row):
                self._check_room(row, adopts or {})
                self._insert(row)
                self._adopt(row, adopts or {})

    def resize(
        self, lease_id: str, epoch: int, seq: int, shares: Mapping[str, int], *, terms: str | None = None
    ) -> None:
        """Give a holder other shares of the devices it has, and other terms where they are named.

        What grows must fit: ActivationRefused changes nothing. StaleFence: no row of this lease and fence stands.
        ValueError: other devices than it has. What is measured settles until the next reading.
        """
        with self._transaction():
            held = self._held(lease_id, epoch, seq)
            if held.keys() != shares.keys():
                raise ValueError(f"lease {lease_id} has shares of {sorted(held)}: {sorted(shares)} is no resize")
            now_s = time.monotonic()
            for device_id, wanted in sorted(shares.items()):
                claimed, counted = held[device_id]
                if wanted != claimed:
                    self._check_share(lease_id, device_id, wanted, more=wanted - counted if wanted > claimed else None)
                if wanted < claimed:
                    ledger_readings.settle_rest(self._db, lease_id, device_id, wanted, now_s)
                self._db.execute(
                    "UPDATE share SET claimed_bytes = ? WHERE lease_id = ? AND device_id = ?",
                    (wanted, lease_id, device_id),
                )
            if terms is not None:
                self._db.execute("UPDATE holder SET terms = ? WHERE lease_id = ?", (terms, lease_id))

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

        What it counted for on a device that is measured is settling from now until the next reading.
        """
        with self._transaction():
            fence = (lease_id, epoch, seq)
            found = self._db.execute("SELECT 1 FROM holder WHERE lease_id = ? AND epoch = ? AND seq = ?", fence)
            if found.fetchone() is None:
                return False
            now_s = time.monotonic()
            ledger_readings.begin_debts(self._db, lease_id, now_s)
            ledger_grounds.note_stop(self._db, lease_id, now_s)
            self._db.execute("DELETE FROM holder WHERE lease_id = ?", (lease_id,))
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
                "engine_pid, engine_start_ticks, since_s, terms FROM holder ORDER BY since_s, lease_id"
            )
            return [_ledger_row(found, shares.get(found[0], {})) for found in holders]

    def put_devices(self, devices: Iterable[Device], readings: Iterable[LedgerReading] = ()) -> None:
        """Make these the node's devices, and enter the latest readings.

        Read the drivers first and `rows()` after: a row admitted in between is then known, and its memory is not
        taken for foreign. A device without a reading keeps its last one. What settled before a reading is forgotten:
        it is in that reading, as free, foreign or residual.
        """
        with self._transaction():
            ledger_readings.put_devices(self._db, list(devices))
            for reading in readings:
                ledger_readings.put_reading(self._db, reading)

    def priors(self) -> dict[str, Prior]:
        """Device id -> what its next reading must be explained with. Read it after the drivers, as with `rows`."""
        with self._transaction(write=False):
            return ledger_readings.priors(self._db)

    def devices(self) -> list[DeviceRow]:
        """All devices with their numbers, in index order."""
        with self._transaction(write=False):
            return ledger_readings.all_devices(self._db)

    def grounds(self) -> dict[str, tuple[Ground, ...]]:
        """Lease id -> what the admission of its holder rested on, device by device."""
        with self._transaction(write=False):
            return ledger_grounds.grounds(self._db)

    def peaks(self) -> dict[str, tuple[SharePeak, ...]]:
        """Lease id -> the most its living holder was seen to use, of the devices that are measured."""
        with self._transaction(write=False):
            return ledger_grounds.peaks(self._db)

    def note_epoch(self, epoch: int) -> None:
        """Remember that the store lived in this epoch."""
        with self._transaction():
            self._note_epoch(epoch)

    def identity(self) -> str:
        """What no other ledger is called, also none of a copied machine: chosen once, kept as long as the file."""
        number = int.from_bytes(os.urandom(6), "big")
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO mark VALUES ('identity', ?)", (number,))
            found = self._db.execute("SELECT value FROM mark WHERE name = 'identity'").fetchone()
            return f"{found[0]:012x}"

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

    def _check_room(self, row: LedgerRow, adopts: Mapping[str, int]) -> None:
        """Raise ActivationRefused unless every share fits its device's effective free."""
        for device_id, wanted in sorted(row.shares.items()):
            if wanted < 0:
                raise ValueError(f"lease {row.lease_id} wants {wanted} bytes of {device_id}")
            device = self._device(device_id, wanted)
            if wanted > device.free_bytes + min(adopts.get(device_id, 0), device.foreign_bytes):
                raise self._refusal(device, wanted)
            if device.measured and not device.per_process:
                self._check_alone(device, wanted)

    def _check_alone(self, device: DeviceRow, wanted: int) -> None:
        """Raise ActivationRefused while a holder is there that no reading of the device as a whole has seen."""
        if (unread := ledger_readings.unread_holder(self._db, device.id)) is None:
            return
        holder, claimed, admitted_s, read_at_s = unread
        now_s = time.monotonic()
        raise errors.ActivationRefused(
            device.id,
            wanted_bytes=wanted,
            free_bytes=device.free_bytes,
            settling_bytes=claimed,
            holders=[(holder, claimed)],
            detail=(
                f"; its driver gives no figures per process, so one holder begins at a time: {holder} began "
                f"{now_s - admitted_s:.1f} s ago, the last reading is {now_s - read_at_s:.1f} s old"
            ),
        )

    def _check_share(self, lease_id: str, device_id: str, wanted: int, *, more: int | None) -> None:
        """Raise ActivationRefused unless a holder may claim `wanted`; `more` than it counts for, where its claim grows.

        A holder that uses more than it claims may not claim that afterwards on a device that is overfull by it.
        """
        if wanted < 0:
            raise ValueError(f"lease {lease_id} wants {wanted} bytes of {device_id}")
        device = self._device(device_id, wanted)
        if more is not None and max(0, more) > device.free_bytes:
            raise self._refusal(device, wanted)

    def _device(self, device_id: str, wanted: int) -> DeviceRow:
        device = ledger_readings.one_device(self._db, device_id)
        if device is None:
            raise errors.ActivationRefused(
                device_id,
                wanted_bytes=wanted,
                free_bytes=0,
                detail="; no such device in this node's ledger: is the keeper up?",
            )
        return device

    def _held(self, lease_id: str, epoch: int, seq: int) -> dict[str, tuple[int, int]]:
        """Device id -> (bytes claimed, bytes it counts for) of the row of this lease and fence; StaleFence for none."""
        found = self._db.execute("SELECT epoch, seq FROM holder WHERE lease_id = ?", (lease_id,)).fetchone()
        if found is None:
            raise errors.StaleFence(f"lease {lease_id} has no row in {self.path}: its size is not changed")
        if found != (epoch, seq):
            raise errors.StaleFence(f"lease {lease_id} runs with fence {found}: ({epoch}, {seq}) is refused")
        shares = self._db.execute(
            "SELECT device_id, claimed_bytes, max(claimed_bytes, coalesce(observed_bytes, 0)) FROM share "
            "WHERE lease_id = ?",
            (lease_id,),
        )
        return {device_id: (claimed, counted) for device_id, claimed, counted in shares}

    def _refusal(self, device: DeviceRow, wanted: int) -> errors.ActivationRefused:
        holders = self._db.execute(
            "SELECT h.holder, max(s.claimed_bytes, coalesce(s.observed_bytes, 0)) AS held FROM share s "
            "JOIN holder h USING (lease_id) WHERE s.device_id = ? ORDER BY held DESC",
            (device.id,),
        ).fetchall()
        if device.foreign_bytes:
            holders.append(("processes without a lease", device.foreign_bytes))
        if kept := device.residual_bytes - device.quarantined_bytes:
            holders.append(("holders beyond or after their leases", kept))
        if device.quarantined_bytes:
            holders.append(("ended holders, not given back by the driver", device.quarantined_bytes))
        return errors.ActivationRefused(
            device.id,
            wanted_bytes=wanted,
            free_bytes=device.free_bytes,
            settling_bytes=device.settling_bytes,
            holders=sorted(holders, key=lambda held: -held[1]),
        )

    def _insert(self, row: LedgerRow) -> None:
        self._note_epoch(row.epoch)
        now_s = time.monotonic()
        for device_id in row.shares:
            if (device := ledger_readings.one_device(self._db, device_id)) is not None:
                ledger_grounds.note_ground(self._db, row.lease_id, device, now_s)
        self._db.execute(
            "INSERT INTO holder VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(row.lease_id, row.epoch, row.seq, row.holder),
                *(row.pid, row.start_ticks, row.pid_namespace),
                *(row.engine_pid, row.engine_start_ticks, row.since_s),
                *(row.terms, now_s),
            ),
        )
        self._db.executemany(
            "INSERT INTO share VALUES (?, ?, ?, NULL, NULL)",
            [(row.lease_id, device, size) for device, size in row.shares.items()],
        )

    def _adopt(self, row: LedgerRow, adopts: Mapping[str, int]) -> None:
        """What the new holder uses already is its own and foreign no more, until the next reading tells anew."""
        for device_id, size in adopts.items():
            if device_id in row.shares:
                ledger_readings.move_foreign(self._db, row.lease_id, device_id, size)

    def _note_epoch(self, epoch: int) -> None:
        self._db.execute(
            "INSERT INTO mark VALUES ('epoch', ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
            (epoch,),
        )


def _ledger_row(found: tuple[Any, ...], shares: Mapping[str, int]) -> LedgerRow:
    lease_id, epoch, seq, holder, *process = found
    return LedgerRow(lease_id, epoch, seq, holder, shares, *process)
