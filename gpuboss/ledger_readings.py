"""Devices and their readings as the node ledger's file has them: the SQL behind `put_devices`, `priors` and `devices`.

Called by `gpuboss.node_ledger` alone, inside its transactions. Light: see `gpuboss.light`.
"""

from __future__ import annotations

from gpuboss.ledger_rows import Debt, DeviceRow, Prior

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from gpuboss.devices import Device
    from gpuboss.ledger_rows import LedgerReading

_USE = """
SELECT d.id, d.kind, d.name, d.idx, d.measured, d.total_bytes, d.reserve_bytes, d.foreign_bytes, d.residual_bytes,
    d.quarantined_bytes, d.read_at_s, d.per_process, coalesce(s.claimed, 0), s.observed, coalesce(e.settling, 0),
    d.total_bytes - d.reserve_bytes - d.foreign_bytes - d.residual_bytes - coalesce(e.settling, 0) - coalesce(s.held, 0)
FROM device d
LEFT JOIN (
    SELECT device_id, sum(claimed_bytes) AS claimed, sum(observed_bytes) AS observed,
        sum(max(claimed_bytes, coalesce(observed_bytes, 0))) AS held
    FROM share GROUP BY device_id
) s ON s.device_id = d.id
LEFT JOIN (SELECT device_id, sum(settling_bytes) AS settling FROM ended GROUP BY device_id) e ON e.device_id = d.id
"""


def all_devices(db: sqlite3.Connection) -> list[DeviceRow]:
    """Every device with its numbers, in index order."""
    return [DeviceRow(*found) for found in db.execute(_USE + " ORDER BY d.idx, d.id")]


def one_device(db: sqlite3.Connection, device_id: str) -> DeviceRow | None:
    """One device with its numbers; None when there is none of that name."""
    found = db.execute(_USE + " WHERE d.id = ?", (device_id,)).fetchone()
    return DeviceRow(*found) if found else None


def put_devices(db: sqlite3.Connection, devices: Sequence[Device]) -> None:
    """Make these the node's devices; those that were there keep their last reading."""
    known = {found[0] for found in db.execute("SELECT id FROM device")}
    for gone in known - {device.id for device in devices}:
        db.execute("DELETE FROM device WHERE id = ?", (gone,))
    db.executemany(
        "INSERT INTO device (id, kind, name, idx, measured, total_bytes, reserve_bytes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, name = excluded.name, idx = excluded.idx, "
        "measured = excluded.measured, total_bytes = excluded.total_bytes, reserve_bytes = excluded.reserve_bytes",
        [(d.id, str(d.kind), d.name, d.index, d.measured, d.total_bytes, d.reserve_bytes) for d in devices],
    )


def put_reading(db: sqlite3.Connection, reading: LedgerReading) -> None:
    """Enter a reading. What settled before it is told by it from now on."""
    device_id, at_s = reading.device_id, reading.at_s
    db.execute(
        "UPDATE device SET foreign_bytes = ?, residual_bytes = ?, quarantined_bytes = ?, base_bytes = ?, "
        "per_process = ?, read_at_s = ? WHERE id = ?",
        (
            *(reading.foreign_bytes, reading.residual_bytes, reading.quarantined_bytes, reading.base_bytes),
            *(reading.per_process, at_s, device_id),
        ),
    )
    db.execute("UPDATE share SET observed_bytes = NULL WHERE device_id = ?", (device_id,))
    db.executemany(
        "UPDATE share SET observed_bytes = ?1, peak_bytes = max(?1, coalesce(peak_bytes, 0)) "
        "WHERE lease_id = ?2 AND device_id = ?3",
        [(size, lease_id, device_id) for lease_id, size in reading.observed.items()],
    )
    db.execute("UPDATE ended SET settling_bytes = 0 WHERE device_id = ? AND since_s < ?", (device_id, at_s))
    db.execute("DELETE FROM ended WHERE settling_bytes = 0 AND used_bytes = 0")
    db.executemany("DELETE FROM ended WHERE id = ?", [(debt_id,) for debt_id in reading.paid])


def priors(db: sqlite3.Connection) -> dict[str, Prior]:
    """What each device's next reading must be explained with."""
    found = {}
    for device_id, foreign, base, per_process, read_at_s in db.execute(
        "SELECT id, foreign_bytes, base_bytes, per_process, read_at_s FROM device"
    ).fetchall():
        shares = db.execute(
            "SELECT s.lease_id, s.observed_bytes, h.admitted_s FROM share s JOIN holder h USING (lease_id) "
            "WHERE s.device_id = ?",
            (device_id,),
        ).fetchall()
        debts = db.execute(
            "SELECT id, holder, used_bytes, floor_bytes, since_s FROM ended "
            "WHERE device_id = ? AND used_bytes > 0 ORDER BY since_s, id",
            (device_id,),
        )
        found[device_id] = Prior(
            foreign,
            base,
            None if read_at_s is None else bool(per_process),
            observed={lease_id: observed for lease_id, observed, _ in shares if observed is not None},
            new=tuple(lease_id for lease_id, _, admitted_s in shares if read_at_s is None or admitted_s > read_at_s),
            debts=tuple(Debt(*debt) for debt in debts),
        )
    return found


def unread_holder(db: sqlite3.Connection, device_id: str) -> tuple[str, int, float, float] | None:
    """The youngest holder on a device that no reading of it has seen yet; None when there is none.

    (name, bytes claimed, when it was admitted, when the device was read)
    """
    found: tuple[str, int, float, float] | None = db.execute(
        "SELECT h.holder, s.claimed_bytes, h.admitted_s, d.read_at_s FROM share s JOIN holder h USING (lease_id) "
        "JOIN device d ON d.id = s.device_id "
        "WHERE d.id = ? AND h.admitted_s >= d.read_at_s "
        "ORDER BY h.admitted_s DESC LIMIT 1",
        (device_id,),
    ).fetchone()
    return found


def begin_debts(db: sqlite3.Connection, lease_id: str, now_s: float) -> None:
    """A holder's row goes: what it counted for settles until the next reading, and is owed until it is seen back.

    Nothing is owed for a lease that was held by word: whoever uses its memory may go on, without a lease. Nor for host
    memory: all of the machine's programs use it, so what does not come back cannot be told from what others take. It is
    in the next reading either way, as foreign.
    """
    db.execute(
        "INSERT INTO ended (device_id, holder, settling_bytes, used_bytes, floor_bytes, since_s) "
        "SELECT s.device_id, h.holder, max(s.claimed_bytes, coalesce(s.observed_bytes, 0)), "
        "    CASE WHEN h.pid IS NULL OR d.kind = 'cpu' THEN 0 ELSE coalesce(s.peak_bytes, s.claimed_bytes) END, "
        # An earlier debt may be in the base already: its own floor is what was there without it.
        "    min(d.base_bytes, coalesce((SELECT min(floor_bytes) FROM ended e "
        "        WHERE e.device_id = d.id AND e.used_bytes > 0), d.base_bytes)), ? "
        "FROM share s JOIN holder h USING (lease_id) JOIN device d ON d.id = s.device_id "
        "WHERE s.lease_id = ? AND d.measured",
        (now_s, lease_id),
    )


def settle_rest(db: sqlite3.Connection, lease_id: str, device_id: str, wanted: int, now_s: float) -> None:
    """A holder claims less from now on: what it counted for beyond that settles, if nobody has seen that it is free."""
    db.execute(
        "INSERT INTO ended (device_id, holder, settling_bytes, used_bytes, floor_bytes, since_s) "
        "SELECT s.device_id, h.holder, s.claimed_bytes - max(?1, coalesce(s.observed_bytes, 0)), 0, 0, ?2 "
        "FROM share s JOIN holder h USING (lease_id) JOIN device d ON d.id = s.device_id "
        "WHERE s.lease_id = ?3 AND s.device_id = ?4 AND s.claimed_bytes > max(?1, coalesce(s.observed_bytes, 0)) "
        "AND d.measured",
        (wanted, now_s, lease_id, device_id),
    )


def move_foreign(db: sqlite3.Connection, lease_id: str, device_id: str, size: int) -> None:
    """Count up to `size` foreign bytes as observed use of a lease."""
    (foreign,) = db.execute("SELECT foreign_bytes FROM device WHERE id = ?", (device_id,)).fetchone()
    moved = min(size, foreign)
    if not moved:  # or nothing measures it
        return
    db.execute(
        "UPDATE device SET foreign_bytes = foreign_bytes - ?1, base_bytes = max(0, base_bytes - ?1) "
        "WHERE id = ?2 AND NOT per_process",
        (moved, device_id),
    )
    db.execute("UPDATE device SET foreign_bytes = foreign_bytes - ? WHERE id = ? AND per_process", (moved, device_id))
    db.execute(
        "UPDATE share SET observed_bytes = ?1, peak_bytes = ?1 WHERE lease_id = ?2 AND device_id = ?3",
        (moved, lease_id, device_id),
    )
