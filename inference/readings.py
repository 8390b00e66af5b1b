"""The ledger's figures as the scheduler takes them: what is ours, what is others', who waits. Pure.

Called by `pool.py` for every look at the ledger, and for an explanation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuboss.devices import DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HOLDS_MEMORY, DeviceUse, HolderKind, Lease, LeaseState, Snapshot
from gpuboss.priority import name_of
from gpuboss.units import format_bytes
from inference.events import DeviceRoom, DevicesRead
from inference.explain import Blocker

__all__ = ["holders", "of_others", "read"]


def read(
    snapshot: Snapshot, *, owner: ProcessIdentity, queued: Mapping[str, str], asked_at_s: float, at_s: float
) -> DevicesRead:
    """The event for a snapshot. `owner` is this process; `queued` our slots' models by the ids of their leases."""
    others = of_others(snapshot, owner)
    waiting = frozenset(lease.id for lease in others if lease.state is LeaseState.QUEUED)
    return DevicesRead(at_s, _rooms(snapshot, others), waiting, _coming(others, queued), asked_at_s)


def of_others(snapshot: Snapshot, owner: ProcessIdentity) -> list[Lease]:
    """The leases of all but our slots. What others lease through us (over HTTP, or without knowing it) is not ours."""
    return [lease for lease in snapshot.leases if lease.kind is not HolderKind.SLOT or lease.owner != owner]


def holders(leases: Iterable[Lease], priority: int) -> tuple[Blocker, ...]:
    """Those of the leases that hold memory, and what would make them give it to a request of that class."""
    return tuple(
        Blocker(lease.holder, sum(lease.shares.values()), _words(lease, priority))
        for lease in leases
        if lease.state in HOLDS_MEMORY and any(lease.shares.values())
    )


def _words(lease: Lease, priority: int) -> str:
    leases = f"it leases {format_bytes(sum(lease.shares.values()))} in class {name_of(lease.priority)}"
    if lease.notice is not None:
        return f"{leases} and was told to yield to {lease.notice.holder} within {max(0.0, lease.notice.left_s):.0f} s"
    if not lease.preemptible:
        return f"{leases} until it ends: it is not pre-emptible"
    if lease.priority > priority:
        return f"{leases}, and would be told to yield within {lease.grace_s:.0f} s"
    return f"{leases}, and yields to more important requests alone"


def _rooms(snapshot: Snapshot, others: list[Lease]) -> tuple[DeviceRoom, ...]:
    """What each device leaves to this pool: foreign programs and other holders' leases are not ours."""
    leased: dict[str, int] = {}
    for lease in others:
        if lease.state in HOLDS_MEMORY:
            for device, share in lease.shares.items():
                leased[device] = leased.get(device, 0) + share
    return tuple(
        DeviceRoom(
            id=use.device.id,
            total_bytes=use.device.total_bytes,
            reserve_bytes=use.device.reserve_bytes,
            others_bytes=use.foreign_bytes + use.residual_bytes + leased.get(use.device.id, 0) + _beyond_claims(use),
            accelerator=use.device.kind is not DeviceKind.CPU,
            leased_bytes=leased.get(use.device.id, 0),
        )
        for use in snapshot.devices
    )


def _beyond_claims(use: DeviceUse) -> int:
    """What all holders together use beyond their claims. One that uses less may hide another that uses more."""
    return max(0, (use.observed_bytes or 0) - use.claimed_bytes)


def _coming(others: list[Lease], queued: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """By model whose slot is queued, the bytes by device that other holders were told to yield to it."""
    coming: dict[str, dict[str, int]] = {}
    for lease in others:
        if lease.notice is not None and lease.notice.by in queued:
            given = coming.setdefault(queued[lease.notice.by], {})
            for device, share in lease.shares.items():
                given[device] = given.get(device, 0) + share
    return coming
