"""Who uses what of each device: drivers' figures turned into figures per lease. Pure.

Called by `gpuboss.node_watch` with what the drivers said and what the node ledger knows of before.

1. A device whose driver tells figures per process. A lease's processes are observed where the lease has a share, and
   residual where it has none. Other living processes are foreign, each by its pid. What no living process accounts for
   is loose: the driver's own, and memory of the dead that did not come back. The least of it that was there while
   everybody lived is the base.
2. One that tells only how much is in use. What changes while a holder begins is its own (they begin one at a time, see
   `NodeLedger.admit`): each is observed to use what came since its admission, up to its claim. Foreign is what was in
   use before, the base, and what exceeds the claims.

On both, an ended holder owes what it was seen to use, as far as that much is in use beyond base and holders. What it
owes is residual, and quarantined once the driver has had time to give it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuboss.devices import Reading
from gpuboss.leases import ForeignUse
from gpuboss.ledger_rows import Debt, LedgerReading, LedgerRow, Prior

__all__ = ["MOST_FOREIGN", "QUARANTINE_AFTER_S", "Account", "account"]

QUARANTINE_AFTER_S = 5.0
"""How long a driver may take to give back what an ended holder used."""
MOST_FOREIGN = 8
"""Processes named per device: every script of the store reads them."""
_PAID_PART = 0.1
"""A debt of which less than this part is left is paid: drivers do not return to the same byte."""


@dataclass(frozen=True, slots=True)
class Account:
    """One device's reading, explained."""

    reading: LedgerReading
    """For the node ledger."""
    foreign: tuple[ForeignUse, ...]
    """Processes without a lease, largest first."""


def account(
    readings: Iterable[Reading],
    rows: Sequence[LedgerRow],
    families: Mapping[str, Collection[int]],
    living: Mapping[int, str],
    priors: Mapping[str, Prior],
) -> list[Account]:
    """One account per measured device.

    `rows` oldest first; `families`: the processes of each lease, as far as they can be seen; `living`: pid -> name of
    the processes that are there, of those in families and readings.
    """
    found = []
    for reading in readings:
        if reading.used_bytes is None:
            continue
        prior = priors.get(reading.device_id, Prior())
        explain = _by_process if reading.complete else _by_change
        ours = {pid for family in families.values() for pid in family}
        listed = [*reading.by_pid.items(), *((pid, None) for pid in reading.without_figure)]
        foreign = [ForeignUse(pid, living[pid], used) for pid, used in listed if pid in living and pid not in ours]
        foreign.sort(key=lambda use: (-(use.bytes or 0), use.pid))
        found.append(
            Account(explain(reading, reading.used_bytes, rows, families, living, prior), tuple(foreign[:MOST_FOREIGN]))
        )
    return found


def _by_process(
    reading: Reading,
    used_bytes: int,
    rows: Sequence[LedgerRow],
    families: Mapping[str, Collection[int]],
    living: Mapping[int, str],
    prior: Prior,
) -> LedgerReading:
    """Case 1."""
    left = dict(reading.by_pid)
    having = [row for row in rows if reading.device_id in row.shares]
    # A process with several leases uses them up oldest first; what it uses beyond all of them counts for the newest.
    observed = {row.lease_id: _take(left, families, row, row.shares[reading.device_id]) for row in having}
    for row in reversed(having):
        observed[row.lease_id] += _take(left, families, row)
    residual = sum(_take(left, families, row) for row in rows if row not in having)
    dying = any(living.keys().isdisjoint(family) for row in having if (family := families.get(row.lease_id, ())))
    loose = max(0, used_bytes - sum(size for pid, size in reading.by_pid.items() if pid in living))
    owed = {debt: min(debt.bytes, max(0, loose - debt.floor_bytes)) for debt in prior.debts if _is_due(debt, reading)}
    paid, owing = _settled(owed)
    residual += _at_most(owing, loose)
    # While somebody dies or owes, what is loose is more than the driver's own.
    base = min(loose, prior.base_bytes) if (dying or prior.debts) and prior.per_process else loose
    return LedgerReading(
        reading.device_id,
        reading.at_s,
        max(0, used_bytes - residual - sum(observed.values())),
        residual,
        observed,
        quarantined_bytes=_at_most(_old(owing, reading), loose),
        base_bytes=base,
        per_process=True,
        paid=paid,
    )


def _take(
    left: dict[int, int], families: Mapping[str, Collection[int]], row: LedgerRow, most: int | None = None
) -> int:
    """Take what is `left` of the row's processes, up to `most`; how much that was."""
    taken = 0
    for pid in families.get(row.lease_id, ()):
        part = left.get(pid, 0) if most is None else min(left.get(pid, 0), most - taken)
        if part:
            left[pid] -= part
            taken += part
    return taken


def _by_change(
    reading: Reading,
    used_bytes: int,
    rows: Sequence[LedgerRow],
    families: Mapping[str, Collection[int]],  # noqa: ARG001 (the signature of case 1)
    living: Mapping[int, str],  # noqa: ARG001
    prior: Prior,
) -> LedgerReading:
    """Case 2."""
    claims = {row.lease_id: row.shares[reading.device_id] for row in rows if reading.device_id in row.shares}
    if prior.per_process is not None:
        # A holder that is new began on top of what was foreign at the reading before it.
        base = min(used_bytes, prior.foreign_bytes if prior.new or prior.per_process else prior.base_bytes)
    else:
        base = max(0, used_bytes - sum(claims.values()) - sum(debt.bytes for debt in prior.debts))
    rest = used_bytes - base
    observed: dict[str, int] = {}
    for lease_id, claim in claims.items():
        observed[lease_id] = min(prior.observed.get(lease_id, 0), claim, rest)
        rest -= observed[lease_id]
    owed: dict[Debt, int] = {}
    settling = 0
    for debt in prior.debts:
        part = min(debt.bytes, rest)
        rest -= part
        if _is_due(debt, reading):
            owed[debt] = part
        else:  # counted as settling by the ledger
            settling += part
    for lease_id, claim in reversed(claims.items()):
        grown = min(claim - observed[lease_id], rest)
        observed[lease_id] += grown
        rest -= grown
    paid, owing = _settled(owed)
    missing = sum(owing.values())
    foreign = max(0, used_bytes - missing - settling - sum(observed.values()))
    return LedgerReading(
        reading.device_id,
        reading.at_s,
        foreign,
        missing,
        observed,
        quarantined_bytes=sum(_old(owing, reading).values()),
        base_bytes=base if claims else foreign,
        per_process=False,
        paid=paid,
    )


def _is_due(debt: Debt, reading: Reading) -> bool:
    """Whether the reading can tell of a debt: an older one does not know that the holder ended."""
    return debt.since_s < reading.at_s


def _settled(owed: Mapping[Debt, int]) -> tuple[tuple[int, ...], dict[Debt, int]]:
    """Ids of what is paid, and what is owed still."""
    owing = {debt: left for debt, left in owed.items() if left > debt.bytes * _PAID_PART}
    return tuple(debt.id for debt in owed if debt not in owing), owing


def _old(owing: Mapping[Debt, int], reading: Reading) -> dict[Debt, int]:
    return {debt: left for debt, left in owing.items() if reading.at_s - debt.since_s >= QUARANTINE_AFTER_S}


def _at_most(owing: Mapping[Debt, int], loose: int) -> int:
    """The sum, which is no more than what is loose above the lowest floor: two debts may look at the same bytes."""
    if not owing:
        return 0
    return min(sum(owing.values()), loose - min(debt.floor_bytes for debt in owing))
