"""The values of a lease: what is asked for, what is granted, and what the ledger shows of it.

Made by callers (`LeaseRequest`) and by `gpuboss.client` from the store's replies (`Lease`, `Snapshot`). Nothing here
talks to anybody.
"""

from __future__ import annotations

import enum
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuboss.devices import Device
from gpuboss.identity import ProcessIdentity
from gpuboss.ledger_rows import Ground
from gpuboss.priority import LEAST_IMPORTANT, OVER_PINNED

__all__ = [
    "GRACE_S",
    "HOLDS_MEMORY",
    "LONGEST_GRACE_S",
    "LONGEST_TTL_S",
    "OVER",
    "SHORTEST_TTL_S",
    "DeviceUse",
    "Fence",
    "ForeignUse",
    "HolderKind",
    "Lease",
    "LeaseRequest",
    "LeaseState",
    "Notice",
    "Shares",
    "Snapshot",
    "job_holder",
    "new_request_id",
]

Shares = Mapping[str, int]
"""Device id -> bytes."""

GRACE_S = 30.0
"""From the notice to yield until a holder is ended, unless it asked for another time."""
LONGEST_GRACE_S = 86_400.0
"""Nobody keeps a more important waiter longer than a day."""
SHORTEST_TTL_S = 1.0
"""A holder that must renew its lease itself gets at least this long; the store's clock is looked at once a second."""
LONGEST_TTL_S = 86_400.0
"""A lease that only its holder's word renews does not outlive it by more than a day."""


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
    preemptible: bool = field(default=False, kw_only=True)
    """Whether a more important waiter may have it: its holder is told to yield, and ended when the grace is over."""
    grace_s: float = field(default=GRACE_S, kw_only=True)
    """From the notice to yield until its holder is ended."""
    ttl_s: float | None = field(default=None, kw_only=True)
    """None: the node's keeper renews it while its holder lives. A number: its holder must renew it that often (an HTTP
    lease without a pid), and its expiry frees it; nothing is killed, and what is still used then is foreign."""
    adopts: Shares = field(default_factory=dict, kw_only=True)
    """Bytes that its future holder uses already, and that count as foreign until then: available to this request."""

    def __post_init__(self) -> None:
        """Refuse with ValueError what could not be granted in any store."""
        if not self.request_id or not self.request_id.replace("-", "").isalnum():
            raise ValueError(f"request id {self.request_id!r} must be letters, digits and '-'")
        if not self.holder.isprintable():
            raise ValueError(f"{self.holder!r} is no name of a holder: it is shown in terminals")
        if not OVER_PINNED <= self.priority <= LEAST_IMPORTANT:
            raise ValueError(f"priority {self.priority} is outside 0-{LEAST_IMPORTANT}")
        if not self.options or not all(self.options):
            raise ValueError(f"{self.holder}: a lease needs at least one option, and every option at least one device")
        for option in self.options:
            for device, size in option.items():
                if size <= 0:
                    raise ValueError(f"{self.holder}: {size} bytes of {device} is no share; leave the device out")
        if any(size < 0 for size in self.adopts.values()):
            raise ValueError(f"{self.holder}: adopts less than nothing: {dict(self.adopts)}")
        if not (math.isfinite(self.grace_s) and 0 <= self.grace_s <= LONGEST_GRACE_S):
            raise ValueError(f"{self.holder}: a grace of {self.grace_s} s is outside 0-{LONGEST_GRACE_S:.0f} s")
        if self.ttl_s is not None and not SHORTEST_TTL_S <= self.ttl_s <= LONGEST_TTL_S:
            wanted = f"{SHORTEST_TTL_S:.0f}-{LONGEST_TTL_S:.0f} s"
            raise ValueError(f"{self.holder}: a time to live of {self.ttl_s} s is outside {wanted}")


@dataclass(frozen=True, slots=True)
class Notice:
    """A holder was told to yield its memory."""

    by: str
    """Id of the lease that waits for the memory; empty when a person asked."""
    holder: str
    """Who wants it, e.g. "job:sft-12"."""
    priority: int
    """The priority of who wants it."""
    since_ms: int
    """Wall clock of the store, in ms since 1970, at which it was given."""
    left_s: float
    """Until its holder is ended; negative once the grace is over."""
    acknowledged: bool
    """Whether the holder has heard it and is yielding. From then on it is not taken back."""
    outranks: bool = True
    """Who wants it is more important, or as important and let the holder pass: the holder yields busy or not. Else,
    which happens to slots only, it yields when it is idle."""


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
    preemptible: bool = False
    """Whether a more important waiter may have it."""
    grace_s: float = GRACE_S
    """From the notice to yield until its holder is ended."""
    ttl_s: float | None = None
    """How often its holder must renew it; None where the node's keeper does that."""
    order: int = 0
    """Its place among those of the same priority: a lower one asked earlier. It keeps it for life."""
    notice: Notice | None = None
    """Its holder was told to yield."""
    why: str = ""
    """Why it was refused, with numbers; empty otherwise."""
    node: str = ""
    """The node that asked, by its name in the store."""
    revision: int = 0
    """How often it was resized. The store resizes a holder only for who knows the last of them."""
    reason: str = ""
    """Why it is over though nobody gave it up: "expired" (nobody asked for it or renewed it any more) or "preempted"
    (one that its holder had to renew)."""
    grounds: tuple[Ground, ...] = field(default=(), compare=False)
    """What its admission rested on, device by device; empty until its node's keeper has told, a beat after that. Shown,
    and no part of what makes two leases equal."""
    wants: Shares = field(default_factory=dict)
    """What a waiter asks for, by its first choice of devices; others may do as well. Empty once it is granted."""


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """A process that uses a device without a lease."""

    pid: int
    name: str
    """What the system calls it; empty where it does not say."""
    bytes: int | None
    """None where the driver does not tell per process."""


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
    quarantined_bytes: int = 0
    """The part of `residual_bytes` that ended holders had and the driver did not give back: never granted."""
    foreign_pids: tuple[ForeignUse, ...] = ()
    """Whose the foreign bytes are, largest first, as far as the driver tells."""
    unread_s: float | None = None
    """How old the last reading is where the driver does not answer any more, and it stands; None where all is well."""


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


def job_holder(name: str) -> str:
    """What people are shown as the holder of a job of this name: "job:sft-12", also where it is called that already."""
    return f"job:{name.removeprefix('job:')}"
