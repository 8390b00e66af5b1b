"""What the scheduler decides: orders that `pool.py` performs, in the sequence given."""

from __future__ import annotations

from dataclasses import dataclass

from inference.errors import InferenceError
from inference.events import Shares


@dataclass(frozen=True, slots=True)
class Ask:
    """Queue a lease for a slot of the model in the ledger: others hold the memory. Once it is granted, the slot loads.

    For a slot that is queued already: ask for these options instead, in the same place of the queue.
    """

    slot_id: str
    model_id: str
    options: tuple[Shares, ...]
    """Where it may go, best first; all devices of one option or none."""
    priority: int
    """Class of the most important ticket that wants it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Queue a lease for a slot of the model (or take the queued one) and load it once the lease is granted."""

    slot_id: str
    model_id: str
    options: tuple[Shares, ...]
    """Where it may go, best first; all devices of one option or none."""
    priority: int
    """Class of the most important ticket that wants it, or of what it goes ahead of."""
    ahead_of: tuple[str, ...] = ()
    """Slots that are queued for others' memory of the same devices: there is room for this one besides, so it must not
    wait behind them in the ledger."""


@dataclass(frozen=True, slots=True)
class Reprice:
    """Give the slot's lease, queued or held, another class."""

    slot_id: str
    priority: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the ledger that the slot heard its notice and is yielding."""

    slot_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Grant no more tickets on the slot; those in flight finish."""

    slot_id: str
    reason: str
    """For the slot's story: who needs the room."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the slot's engine (or its load) and release its lease."""

    slot_id: str
    reason: str
    error: InferenceError | None = None
    """How the requests end that are in flight; None where there are none."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The ticket may use the slot's engine now."""

    ticket_id: str
    slot_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The ticket leaves the queue with this error."""

    ticket_id: str
    error: InferenceError


Action = Ask | Start | Reprice | Acknowledge | Drain | Stop | Grant | Refuse
