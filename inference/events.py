"""What the scheduler is told: facts in the past tense, each with the moment it happened.

Fed by `pool.py` alone. `at_s` is monotonic seconds; the scheduler has no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuboss.priority import LEAST_IMPORTANT
from inference.errors import InferenceError
from inference.fault import Fault
from inference.model import Model

Shares = Mapping[str, int]
"""Bytes per device id."""


class Purpose(StrEnum):
    """Why a ticket waits."""

    INFER = "infer"
    """A request that will use the engine."""
    LOAD = "load"
    """An operator wants the model loaded; served the moment the model is ready."""
    PEEK = "peek"
    """Tokenize and the like: may load into free room, evicts nobody, does not extend warmth."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One waiting request."""

    id: str
    """Unique in this process."""
    model_id: str
    """Which model it wants."""
    priority: int
    """Its class, 0-1000; lower is more important."""
    submitted_at_s: float
    """When it joined the queue, monotonic."""
    client_id: str | None = None
    """Who asks, as far as they said."""
    stay_warm_s: float | None = None
    """Seconds the model shall stay loaded after this request; None: the model's own."""
    purpose: Purpose = Purpose.INFER
    session_id: str | None = None
    """A conversation: of several slots it goes to the one that had its last request, if that has a place."""
    cooldown_s: float | None = None
    """Seconds that the client's next request waits after this one is done; None: as configured."""


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What the pool may use of one device, before its own slots are counted."""

    id: str
    total_bytes: int
    """Physical size."""
    reserve_bytes: int
    """The owner's share that nobody may take."""
    others_bytes: int
    """Held by other leases, by programs without one, or not yet returned."""
    accelerator: bool
    """False for host memory, which is used only where no accelerator is configured."""
    leased_bytes: int = 0
    """What of `others_bytes` other holders have leases for: it may come back, and somebody may wait for it."""
    node: str = ""
    """The host it is in: a model is never split over several."""

    @property
    def capacity_bytes(self) -> int:
        """What slots could have if the device were otherwise empty."""
        return self.total_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True)
class Arrived:
    """A ticket joined the queue."""

    at_s: float
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A waiting ticket's caller went away."""

    at_s: float
    ticket_id: str


@dataclass(frozen=True, slots=True)
class Served:
    """A granted ticket is done with its engine, however it ended."""

    at_s: float
    ticket_id: str


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A starting slot got its memory."""

    at_s: float
    slot_id: str
    shares: Shares


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A slot's lease is gone although its engine may run; the slot is being stopped."""

    at_s: float
    slot_id: str


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A slot's engine answers."""

    at_s: float
    slot_id: str
    load_s: float
    """Seconds from the granted lease to the first answer."""


@dataclass(frozen=True, slots=True)
class SlotAdopted:
    """The engine of an earlier broker was found alive and ready, with its lease."""

    at_s: float
    slot_id: str
    model_id: str
    shares: Shares
    load_s: float
    """Seconds its load took then."""
    priority: int = LEAST_IMPORTANT
    """The class its lease has."""


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """A slot's engine ended by itself or never became ready; its memory is free again."""

    at_s: float
    slot_id: str
    error: InferenceError
    was_ready: bool
    """True when it had been serving: waiting tickets are then worth another load."""
    fault: Fault | None = None
    """What was wrong with the engine; None where it was not the engine: no memory, no ledger, no program."""


@dataclass(frozen=True, slots=True)
class SlotWedged:
    """A stopped slot's processes survive SIGKILL: its memory is not to be had until SlotGone."""

    at_s: float
    slot_id: str


@dataclass(frozen=True, slots=True)
class SlotGone:
    """A stopped slot's processes are dead and its lease is released."""

    at_s: float
    slot_id: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Somebody outside waits for memory that a slot holds, and the ledger asks the slot to yield it."""

    at_s: float
    slot_id: str
    by: str
    """Id of the lease that waits; empty for a person, who wants the slot gone and waits for nothing."""
    holder: str
    """Who that is, for people."""
    priority: int
    """The class of what waits."""
    deadline_s: float
    """When the grace is over, monotonic."""
    outranks: bool = False
    """For a lease of the slot's own class: it waited before the slot got its memory, and let the slot pass."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The notice stands no more: who waited has what it wanted, or gave up."""

    at_s: float
    slot_id: str


@dataclass(frozen=True, slots=True)
class UnloadWanted:
    """An operator wants a model out of memory."""

    at_s: float
    model_id: str


@dataclass(frozen=True, slots=True)
class DevicesRead:
    """New figures for the devices."""

    at_s: float
    devices: tuple[DeviceRoom, ...]
    waiting: frozenset[str] = frozenset()
    """Ids of the leases that others wait for."""
    coming: Mapping[str, Shares] = field(default_factory=dict)
    """By slot that is queued for others' memory, what holders were told to yield to it."""
    asked_at_s: float = math.inf
    """When the figures were asked for: they know nothing of what came later."""


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """The set of known models, or what is known of them, changed."""

    at_s: float
    models: Mapping[str, Model]


@dataclass(frozen=True, slots=True)
class ShutdownBegan:
    """The broker is on its way out: refuse who waits, drain who runs."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ShutdownDue:
    """The broker waits for nobody any more: what still runs is cut short."""

    at_s: float
    shutdown_s: float
    """How long it waited."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""

    at_s: float


Event = (
    Arrived
    | Abandoned
    | Served
    | LeaseGranted
    | LeaseLost
    | SlotReady
    | SlotAdopted
    | SlotFailed
    | SlotWedged
    | SlotGone
    | Noticed
    | Withdrawn
    | UnloadWanted
    | DevicesRead
    | ModelsChanged
    | ShutdownBegan
    | ShutdownDue
    | Tick
)
