"""What can be asked of the store about leases, whoever holds them: find, look, renew, tell to yield, audit.

The part of `gpuboss.client.Client` that needs neither the keeper nor the node's books.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuboss import errors
from gpuboss.devices import Device
from gpuboss.lease_wire import lease_from, snapshot_from
from gpuboss.leases import Lease, Snapshot
from gpuboss.peaks import PeakRecord, record_from
from gpuboss.scripts import Script
from gpuboss.store import Reply, Store

__all__ = ["LeaseCalls", "Renewed", "fenced", "stale"]


@dataclass(frozen=True, slots=True)
class Renewed:
    """What became of leases that were to be renewed."""

    leases: tuple[Lease, ...]
    """They are renewed, as they stand now."""
    stale: tuple[str, ...]
    """Ids of leases that are over or another's."""
    unknown: tuple[str, ...]
    """Ids that the store does not know, e.g. after it was wiped; their node's keeper tells it of those that run."""


class LeaseCalls:
    """See the module. The base of `Client`."""

    def __init__(self, store: Store, node: str, devices: tuple[Device, ...]) -> None:
        self.node = node
        """This host's name in the store."""
        self.devices = devices
        """The node's devices, in index order."""
        self._store = store

    async def find(self, lease_id: str) -> Lease | None:
        """A lease as it stands, also one that ended less than ten minutes ago; None when the store knows none.

        Raises StoreUnavailable.
        """
        reply = await self._store.call(Script.LOOK, {"ids": [lease_id]})
        for view in reply["leases"] or ():
            if "holder" in view:
                return lease_from(view)
        return None

    async def snapshot(self) -> Snapshot:
        """The node's devices and leases at one moment. Raises StoreUnavailable."""
        return self.read_snapshot(await self._store.call(Script.SNAPSHOT, {"node": self.node}))

    def read_snapshot(self, reply: Reply) -> Snapshot:
        """The reply of the script `snapshot` as a value."""
        return snapshot_from(reply, self.devices)

    async def audit(self) -> list[str]:
        """What in the store contradicts itself, added up anew: nothing, or a fault of ours, or somebody's tampering."""
        return list((await self._store.call(Script.AUDIT))["faults"] or ())

    async def learn(self, profile: str, lease: Lease, size_by_kind: Mapping[str, int]) -> PeakRecord:
        """Keep what a lease's holder was seen to take at most, under a name for all holders like it; by kind of device.

        Telling again of the same lease keeps the larger figures. The latest leases count (5), of the latest profiles
        (512). Raises StoreUnavailable.
        """
        told = {"profile": profile, "id": lease.id, "bytes": dict(size_by_kind)}
        return record_from((await self._store.call(Script.LEARN, told))["record"])

    async def learned(self) -> tuple[PeakRecord, ...]:
        """All that was learned. Raises StoreUnavailable."""
        reply = await self._store.call(Script.LEARNED)
        return tuple(map(record_from, reply["records"] or ()))

    async def renew_many(self, leases: Sequence[Lease]) -> Renewed:
        """`renew` for several at once, in one command; says what became of each. Raises StoreUnavailable."""
        told = [fenced(lease) for lease in leases]
        reply = await self._store.call(Script.RENEW_MANY, {"leases": told})
        return Renewed(
            tuple(map(lease_from, reply["renewed"] or ())),
            tuple(reply["stale"] or ()),
            tuple(reply["unknown"] or ()),
        )

    async def preempt(self, lease_id: str, *, by: str, grace_s: float | None = None) -> Lease:
        """Ask a held lease to yield, pre-emptible or not, for a person or a broker named in `by`.

        `grace_s`: from now until its holder is ended, but never longer than a grace that has begun; None: as it asked
        for. Raises StaleFence when no such lease is
        held, StoreUnavailable.
        """
        more = {} if grace_s is None else {"grace_ms": round(grace_s * 1000)}
        reply = await self._store.call(Script.PREEMPT, {"id": lease_id, "by": by, **more})
        view = reply.get("lease")
        if reply["status"] != "ok" or view is None:
            raise errors.StaleFence(f"lease {lease_id} is not held by anybody: there is nothing to yield")
        return lease_from(view)

    async def ack(self, lease: Lease) -> Lease:
        """Say that the holder has heard its notice and is yielding: the notice is not taken back any more.

        Raises StaleFence when the lease is over or another's, StoreUnavailable.
        """
        reply = await self._store.call(Script.ACK, fenced(lease))
        if reply["status"] == "stale":
            raise stale(lease, reply.get("lease"))
        return lease_from(reply["lease"])


def fenced(lease: Lease) -> Reply:
    """Id and fence, as the scripts take them. Raises StaleFence for a lease that was not granted."""
    if lease.fence is None:
        raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is {lease.state}: nobody holds it yet")
    return {"id": lease.id, "epoch": lease.fence.epoch, "seq": lease.fence.seq}


def stale(lease: Lease, view: Reply | None) -> errors.StaleFence:
    """The error for a lease that the store shows otherwise."""
    state = view["state"] if view else "unknown"
    return errors.StaleFence(f"lease {lease.id} of {lease.holder} is {state} in the store, or granted anew to another")
