"""What the node ledger remembers beside its books: what each admission rested on, and what each holder took at most.

The SQL behind `NodeLedger.grounds` and `NodeLedger.peaks`. Called by `gpuboss.node_ledger` alone, inside its
transactions. Light: see `gpuboss.light`.
"""

from __future__ import annotations

from gpuboss.ledger_rows import Ground, SharePeak

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3

    from gpuboss.ledger_rows import DeviceRow


def note_ground(db: sqlite3.Connection, lease_id: str, device: DeviceRow, now_s: float) -> None:
    """A share of a device is about to be entered: its numbers as they are, how old they are, and whose end was last."""
    stop = db.execute("SELECT holder, at_s FROM stop WHERE device_id = ?", (device.id,)).fetchone()
    db.execute(
        "INSERT OR REPLACE INTO ground (lease_id, device_id, free_bytes, read_age_s, after, after_age_s) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (
            *(lease_id, device.id, device.free_bytes),
            None if device.read_at_s is None else round(now_s - device.read_at_s, 6),
            *(("", None) if stop is None else (stop[0], round(now_s - stop[1], 6))),
        ),
    )


def note_stop(db: sqlite3.Connection, lease_id: str, now_s: float) -> None:
    """A lease's row is about to go."""
    db.execute(
        "INSERT OR REPLACE INTO stop (device_id, holder, at_s) "
        "SELECT s.device_id, h.holder, ? FROM share s JOIN holder h USING (lease_id) WHERE s.lease_id = ?",
        (now_s, lease_id),
    )
    db.execute("DELETE FROM ground WHERE lease_id = ?", (lease_id,))


def grounds(db: sqlite3.Connection) -> dict[str, tuple[Ground, ...]]:
    """By lease, in the devices' index order."""
    found: dict[str, tuple[Ground, ...]] = {}
    for lease_id, *fields in db.execute(
        "SELECT g.lease_id, g.device_id, g.free_bytes, g.read_age_s, g.after, g.after_age_s "
        "FROM ground g LEFT JOIN device d ON d.id = g.device_id ORDER BY d.idx, g.device_id"
    ):
        found[lease_id] = (*found.get(lease_id, ()), Ground(*fields))
    return found


def peaks(db: sqlite3.Connection) -> dict[str, tuple[SharePeak, ...]]:
    """By lease; only what was seen."""
    found: dict[str, tuple[SharePeak, ...]] = {}
    for lease_id, *fields in db.execute(
        "SELECT s.lease_id, s.device_id, s.peak_bytes, d.read_at_s FROM share s JOIN device d ON d.id = s.device_id "
        "WHERE s.peak_bytes IS NOT NULL AND s.observed_bytes IS NOT NULL AND d.read_at_s IS NOT NULL "
        "ORDER BY d.idx, s.device_id"
    ):
        found[lease_id] = (*found.get(lease_id, ()), SharePeak(*fields))
    return found
