"""Who uses what of each device: drivers' figures per process turned into figures per lease. Pure.

Called by `gpuboss.node_watch` with what the drivers said and what the node ledger holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gpuboss.devices import Reading
from gpuboss.ledger_rows import LedgerReading, LedgerRow

__all__ = ["account"]


def account(
    readings: Iterable[Reading], rows: Sequence[LedgerRow], families: Mapping[str, Collection[int]]
) -> list[LedgerReading]:
    """One ledger reading per measured device; `families` tells the processes of each lease.

    1. A device that gives figures per process: a lease's processes are observed where the lease has a share and count
    as
       residual where it has none; the rest is foreign.
    2. One that does not: what is in use beyond the claims is foreign, for nobody can say whose it is.
    """
    found = []
    for reading in readings:
        if reading.used_bytes is None:
            continue
        if not reading.complete:  # 2
            claimed = sum(row.shares.get(reading.device_id, 0) for row in rows)
            found.append(LedgerReading(reading.device_id, reading.at_s, max(0, reading.used_bytes - claimed)))
            continue
        observed: dict[str, int] = {}  # 1
        residual = 0
        for row in rows:
            used = sum(reading.by_pid.get(pid, 0) for pid in families.get(row.lease_id, ()))
            if reading.device_id in row.shares:
                observed[row.lease_id] = used
            else:
                residual += used
        foreign = max(0, reading.used_bytes - residual - sum(observed.values()))
        found.append(LedgerReading(reading.device_id, reading.at_s, foreign, residual, observed))
    return found
