"""The states of a slot and the moves between them. Read by the scheduler (its view) and by `slot.py` (the truth).

IDLE -> LOADING -> READY -> DRAINING -> STOPPING -> IDLE
IDLE | FAILED -> QUEUED -> LOADING           others hold the memory: the lease waits first
QUEUED -> STOPPING | FAILED                  nobody wants it any more; it can never be granted
LOADING | READY | DRAINING -> FAILED         the engine ended by itself, or never became ready
LOADING | READY -> STOPPING                  a load nobody wants; a stop without a drain
IDLE -> READY                                the engine of a broker that died was found alive, and is ours now
FAILED -> LOADING | IDLE                     asked for again; forgotten
STOPPING -> WEDGED                           the processes would not die: the memory is not ours to give
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class SlotState(StrEnum):
    """Where a slot (one model's place: lease and process) is in its life."""

    IDLE = "idle"
    """No lease, no process."""
    QUEUED = "queued"
    """Its lease waits in the ledger for memory that others hold; it holds none."""
    LOADING = "loading"
    """Its lease is queued or granted and the engine is on its way to answering."""
    READY = "ready"
    """The engine answers; tickets may be granted."""
    DRAINING = "draining"
    """Takes no new tickets; those in flight finish."""
    STOPPING = "stopping"
    """The engine is being ended; the lease is released once its processes are dead."""
    FAILED = "failed"
    """The engine ended or never became ready; its memory is free again and the next request may load it anew."""
    WEDGED = "wedged"
    """The engine's processes survive SIGKILL; its lease stays held and is shown."""


HOLDS_MEMORY = frozenset({SlotState.LOADING, SlotState.READY, SlotState.DRAINING, SlotState.STOPPING, SlotState.WEDGED})
"""States in which the slot's lease counts against the devices."""

HAS_LIFE = HOLDS_MEMORY | {SlotState.QUEUED}
"""States in which something of the slot is under way, and its end will be reported."""

LEAVING = frozenset({SlotState.DRAINING, SlotState.STOPPING})
"""States whose memory is on its way back."""

TRANSITIONS: Mapping[SlotState, frozenset[SlotState]] = {
    SlotState.IDLE: frozenset({SlotState.QUEUED, SlotState.LOADING, SlotState.READY}),
    SlotState.QUEUED: frozenset({SlotState.LOADING, SlotState.STOPPING, SlotState.FAILED}),
    SlotState.LOADING: frozenset({SlotState.READY, SlotState.STOPPING, SlotState.FAILED}),
    SlotState.READY: frozenset({SlotState.DRAINING, SlotState.STOPPING, SlotState.FAILED}),
    SlotState.DRAINING: frozenset({SlotState.STOPPING, SlotState.FAILED}),
    SlotState.STOPPING: frozenset({SlotState.IDLE, SlotState.WEDGED}),
    SlotState.FAILED: frozenset({SlotState.QUEUED, SlotState.LOADING, SlotState.IDLE}),
    SlotState.WEDGED: frozenset({SlotState.IDLE}),
}
"""Allowed moves; anything else raises `errors.IllegalTransition` with the slot's story."""
