"""What the scheduler decides: orders that `pool.py` performs, in the sequence given."""

from __future__ import annotations

from dataclasses import dataclass

from inference.errors import InferenceError
from inference.events import Shares


@dataclass(frozen=True, slots=True)
class Start:
    """Queue a lease for the model's slot and load it once the lease is granted."""

    model_id: str
    options: tuple[Shares, ...]
    """Where it may go, best first; all devices of one option or none."""
    priority: int
    """Class of the most important ticket that wants it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Grant no more tickets on the slot; those in flight finish."""

    model_id: str
    reason: str
    """For the slot's story: who needs the room."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the slot's engine (or its load) and release its lease."""

    model_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The ticket may use the slot's engine now."""

    ticket_id: str
    model_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The ticket leaves the queue with this error."""

    ticket_id: str
    error: InferenceError


Action = Start | Drain | Stop | Grant | Refuse
