"""A node's devices and rows in the words of the script `node_sync`. Pure.

Called by `gpuboss.node_watch`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from gpuboss.identity import ProcessIdentity
from gpuboss.leases import ForeignUse, HolderKind
from gpuboss.ledger_rows import DeviceRow, Ground, LedgerRow
from gpuboss.priority import NORMAL
from gpuboss.wire import grounds_to_wire, process_to_wire

__all__ = ["device_told", "is_by_word", "only_terms", "row_told"]

_TERMS = ("kind", "priority", "preemptible", "grace_ms", "lease_ttl_ms", "order", "owner")
"""What belongs to a lease beyond what a row says in its own columns."""
_log = logging.getLogger(__name__)


def device_told(row: DeviceRow, foreign: Iterable[ForeignUse], *, is_silent: bool) -> dict[str, Any]:
    """A device; `is_silent`: its driver does not answer and the last reading stands."""
    told = {
        "total": row.total_bytes,
        "reserve": row.reserve_bytes,
        "foreign": row.foreign_bytes,
        "residual": row.residual_bytes + row.settling_bytes,
        "quarantined": row.quarantined_bytes,
        "settles": row.measured,
        "foreign_pids": [
            {"pid": use.pid, "name": use.name} | ({} if use.bytes is None else {"bytes": use.bytes}) for use in foreign
        ],
    }
    if is_silent and row.read_at_s is not None:
        told["unread_s"] = round(time.monotonic() - row.read_at_s, 1)
    return told


def row_told(
    row: LedgerRow,
    memo: Mapping[str, Any],
    shares: Mapping[str, int],
    observed: Mapping[str, int],
    grounds: Iterable[Ground] = (),
) -> dict[str, Any]:
    """A row; `shares` and `observed` by the store's names of the devices, `grounds` by their own.

    Its terms are what the store said of them last (`memo`), else what the row was admitted with, else as usual. Its
    owner is who the row says, where it does: whoever takes a lease over writes it there first.
    """
    terms = _terms_of(row)
    owner = {"owner": terms["owner"], "is_owner": True} if "owner" in terms else {}
    usual = {
        "kind": _kind_of(row.holder),
        "priority": NORMAL,
        "owner": json.dumps(process_to_wire(row.process or ProcessIdentity.current())),
    }
    return {
        **usual,
        **terms,
        **memo,
        **owner,
        "id": row.lease_id,
        "holder": row.holder,
        "epoch": row.epoch,
        "seq": row.seq,
        "shares": json.dumps(shares),
        "observed": json.dumps(observed),
    } | ({"grounds": grounds_to_wire(grounds)} if grounds else {})


def only_terms(found: Mapping[str, Any]) -> dict[str, Any]:
    """The terms among other things that are said of a lease."""
    return {name: found[name] for name in _TERMS if name in found}


def is_by_word(row: LedgerRow) -> bool:
    """Whether the lease is its holder's to renew, so that the store alone says when it is over."""
    return row.process is None or bool(_terms_of(row).get("lease_ttl_ms"))


def _terms_of(row: LedgerRow) -> dict[str, Any]:
    try:
        found = json.loads(row.terms) if row.terms else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        _log.error("lease %s of %s: its terms are not understood: %r", row.lease_id, row.holder, row.terms)
        return {}
    return only_terms(found)


def _kind_of(holder: str) -> str:
    """The holder's kind, from its name (`slot:robin`), for a lease that no store remembers."""
    prefix = holder.partition(":")[0]
    return prefix if prefix in set(HolderKind) else HolderKind.JOB
