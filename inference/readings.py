"""The ledger's figures as the scheduler takes them: what is ours, what is others', who waits. Pure.

Called by `pool.py` for every look at the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuboss.devices import DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HOLDS_MEMORY, DeviceUse, HolderKind, Lease, LeaseState, Snapshot
from inference.events import DeviceRoom, DevicesRead

__all__ = ["read"]


def read(
    snapshot: Snapshot, *, owner: ProcessIdentity, queued: Mapping[str, str], asked_at_s: float, at_s: float
) -> DevicesRead:
    """The event for a snapshot. `owner` is this process; `queued` our slots' models by the ids of their leases."""
    others = [lease for lease in snapshot.leases if not _is_ours(lease, owner)]
    waiting = frozenset(lease.id for lease in others if lease.state is LeaseState.QUEUED)
    return DevicesRead(at_s, _rooms(snapshot, others), waiting, _coming(others, queued), asked_at_s)


def _is_ours(lease: Lease, owner: ProcessIdentity) -> bool:
    """Is it one of our slots'? What others lease through us (over HTTP, or without knowing it) is not ours."""
    return lease.kind is HolderKind.SLOT and lease.owner == owner


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
