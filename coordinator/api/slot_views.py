"""Slots and waiting requests as the control API shows them. Called by `control.py`, `views.py` and `passthrough.py`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from gpuboss.ledger_rows import Ground, SharePeak
from gpuboss.priority import name_of
from inference import breaker
from inference.pool import Pool, QueueEntry
from inference.slot import Slot
from inference.slot_state import HAS_LIFE, LEAVING, SlotState

Peaks = Mapping[str, tuple[SharePeak, ...]]
"""By lease, the most its holder was seen to use."""
_NO_PEAKS: Final[Peaks] = MappingProxyType({})
_BY_USE: Final = (
    SlotState.READY,
    SlotState.LOADING,
    SlotState.QUEUED,
    SlotState.DRAINING,
    SlotState.STOPPING,
    SlotState.WEDGED,
    SlotState.FAILED,
    SlotState.IDLE,
)
"""States of a slot, those first in which it is most use to a caller."""


def slots_of(pool: Pool, model_id: str) -> list[Slot]:
    """A model's slots, those first that are most use to a caller."""
    found = [slot for slot in pool.slots().values() if slot.model.id == model_id]
    return sorted(found, key=lambda slot: _BY_USE.index(slot.state))


def state_of(pool: Pool, model_id: str) -> SlotState:
    """The best state that one of a model's slots has; idle where it never had one."""
    found = slots_of(pool, model_id)
    return found[0].state if found else SlotState.IDLE


def shown(pool: Pool, slot: Slot, peaks: Peaks = _NO_PEAKS) -> dict[str, Any]:
    """A slot. `devices` is claimed bytes per device, `pid` the engine's and `shim_pid` that of its supervisor.

    `observed_bytes`: the most its engine was seen to use, per device; null where no driver measures it.
    `stays_s`: seconds until it leaves if nobody asks for it; null where it does not leave by itself, or is not ready.
    `retry_s`: seconds until its engine, which failed, is started again; null where nothing holds it up.
    """
    view, lease = pool.slot_view(slot.id), slot.lease
    retry_s, trouble = _after_failures(pool, slot)
    return {
        "model": slot.model.id,
        "slot": slot.id,
        "state": str(slot.state),
        "pid": slot.pid,
        "shim_pid": slot.shim_pid,
        "devices": dict(lease.shares) if lease is not None else {},
        "claim_bytes": slot.model.claim_bytes,
        "observed_bytes": _observed(peaks.get(lease.id, ())) if lease is not None else None,
        "in_flight": view.in_flight,
        "waiting": view.waiting,
        "load_fraction": slot.load_fraction,
        "last_load_s": slot.last_load_s,
        "priority": name_of(view.priority) if view.priority is not None else None,
        "pin": view.pinned,
        "stays_s": _seconds_to(view.warm_until_s),
        "leaves_for": view.beneficiary if slot.state in LEAVING else None,
        "yields_to": view.noticed_by,
        "retry_s": retry_s,
        "trouble": trouble,
    }


def story(slot: Slot) -> list[dict[str, Any]]:
    """A slot's latest moves, oldest first, with the seconds since each."""
    now_s = time.monotonic()
    return [
        {"state": str(move.state), "reason": move.reason, "ago_s": round(now_s - move.at_s, 3)} for move in slot.story
    ]


def grounds(found: Iterable[Ground]) -> list[dict[str, Any]]:
    """What the grant of its memory rested on, device by device: what was free, how old the reading was, and who had
    ended there last."""
    return [
        {
            "device": ground.device_id,
            "free_bytes": ground.free_bytes,
            "read_age_s": ground.read_age_s,
            "after": ground.after or None,
            "after_age_s": ground.after_age_s,
        }
        for ground in found
    ]


def queued(entry: QueueEntry) -> dict[str, Any]:
    """A waiting request; `counts_as` is the class it has risen to, `kept_place` says that it stands where its client
    stood before for the same model."""
    return {
        "position": entry.position,
        "model": entry.ticket.model_id,
        "priority": name_of(entry.ticket.priority),
        "counts_as": name_of(entry.priority),
        "client_id": entry.ticket.client_id,
        "purpose": str(entry.ticket.purpose),
        "waited_s": round(entry.waited_s, 3),
        "eta_s": round(entry.eta_s, 3) if entry.eta_s is not None else None,
        "kept_place": entry.keeps_place,
    }


def _observed(peaks: Iterable[SharePeak]) -> dict[str, int] | None:
    return {peak.device_id: peak.bytes for peak in peaks} or None


def _after_failures(pool: Pool, slot: Slot) -> tuple[float | None, str | None]:
    """When its engine is started again, and what was wrong with it."""
    last = slot.story[-1].reason if slot.story else None
    if slot.state is SlotState.WEDGED:
        return None, last
    if slot.state in HAS_LIFE:
        return None, None
    match pool.may_start(slot.model.id):
        case breaker.NotBefore(at_s):
            return _seconds_to(at_s), last
        case breaker.Open(until_s, _, words):
            return _seconds_to(until_s), words
        case breaker.Standing(_, words):
            return None, words
    return None, last if slot.state is SlotState.FAILED else None


def _seconds_to(moment_s: float | None) -> float | None:
    return round(max(0.0, moment_s - time.monotonic()), 3) if moment_s is not None else None
