"""The values of a lease: what is asked for, what is granted, and what the ledger shows of it.

Made by callers (`LeaseRequest`) and by `gpuboss.client` from the store's replies (`Lease`, `Snapshot`). Nothing here
talks to anybody.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from gpuboss.devices import Device
from gpuboss.identity import ProcessIdentity
from gpuboss.priority import LEAST_IMPORTANT

__all__ = [
    "HOLDS_MEMORY",
    "OVER",
    "DeviceUse",
    "Fence",
    "HolderKind",
    "Lease",
    "LeaseRequest",
    "LeaseState",
    "Shares",
    "Snapshot",
    "new_request_id",
]

Shares = Mapping[str, int]
"""Device id -> bytes."""


class LeaseState(enum.StrEnum):
    """Where a lease stands: queued -> granted -> active -> ending -> freed, or refused, or cancelled."""

    QUEUED = "queued"
    """It waits for memory; it holds none."""
    GRANTED = "granted"
    """The memory is kept for it; its holder has not begun to use it as far as the node's books say."""
    ACTIVE = "active"
    """The node's books show its holder."""
    ENDING = "ending"
    """It was not renewed in time. It still counts, and its holder's renewal revives it."""
    FREED = "freed"
    """Its holder is gone and the memory is given back."""
    REFUSED = "refused"
    """It can never be granted on the devices there are."""
    CANCELLED = "cancelled"
    """It was given up before it was used, or its waiter vanished."""


HOLDS_MEMORY = frozenset({LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.ENDING})
"""States in which a lease counts against its devices."""
OVER = frozenset({LeaseState.FREED, LeaseState.REFUSED, LeaseState.CANCELLED})
"""States that nothing leads out of."""


class HolderKind(enum.StrEnum):
    """What sort of holder uses the memory."""

    SLOT = "slot"
    """A model that the broker runs."""
    JOB = "job"
    """A program of a person, such as a training run."""
    SERVICE = "service"
    """A program that was not started under a lease and was given one."""


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """Names one grant for ever: no two grants share a fence, and a later grant's is higher."""

    epoch: int
    """The life of the store in which the grant was made."""
    seq: int
    """The number of the grant in that epoch."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What somebody asks for. Asking again with the same `request_id` asks for the same lease, not for a second."""

    request_id: str
    """The idempotency key, e.g. from `new_request_id()`."""
    holder: str
    """Shown to people, e.g. "slot:robin" or "job:sft-12"."""
    kind: HolderKind
    options: tuple[Shares, ...]
    """Alternatives, best first: the first that fits is granted, on all its devices or on none."""
    priority: int
    """0-1000; lower is more important."""

    def __post_init__(self) -> None:
        """Refuse with ValueError what could not be granted in any store."""
        if not self.request_id or not self.request_id.replace("-", "").isalnum():
            raise ValueError(f"request id {self.request_id!r} must be letters, digits and '-'")
        if not 0 <= self.priority <= LEAST_IMPORTANT:
            raise ValueError(f"priority {self.priority} is outside 0-{LEAST_IMPORTANT}")
        if not self.options or not all(self.options):
            raise ValueError(f"{self.holder}: a lease needs at least one option, and every option at least one device")
        for option in self.options:
            for device, size in option.items():
                if size <= 0:
                    raise ValueError(f"{self.holder}: {size} bytes of {device} is no share; leave the device out")


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease as the store showed it last."""

    id: str
    """Names the lease; equal to `request_id`."""
    request_id: str
    holder: str
    kind: HolderKind
    state: LeaseState
    shares: Shares
    """What is held; empty while queued."""
    priority: int
    fence: Fence | None
    """None before the grant."""
    position: int | None
    """1-based place in the queue of all waiters; None when not queued."""
    owner: ProcessIdentity
    """The process that asked."""
    since_ms: int
    """Wall clock of the store, in ms since 1970, at which it entered this state."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device and who uses how much of it."""

    device: Device
    claimed_bytes: int
    """Sum of the leases that hold memory on it."""
    observed_bytes: int | None
    """What the driver says those leases' processes use; None where nothing measures it."""
    foreign_bytes: int
    """In use by processes without a lease."""
    residual_bytes: int
    """In use by holders beyond or after their leases."""
    free_bytes: int
    """Effective free: what can be granted now; negative when more is in use than may be."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole ledger of one node at one moment."""

    epoch: int
    """The life of the store in which it was taken."""
    devices: tuple[DeviceUse, ...]
    leases: tuple[Lease, ...]
    """Holders first, then waiters in queue order."""


def new_request_id() -> str:
    """A request id nobody else has."""
    return uuid.uuid4().hex
