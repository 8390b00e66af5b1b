"""What slots and the pool need of the ledger of device memory, so that tests can play it.

`gpuboss.client.Client` is the real one; its docstrings say what raises what.
"""

from __future__ import annotations

from typing import Protocol

from gpuboss.devices import Device
from gpuboss.leases import Lease, LeaseRequest, Snapshot
from gpuboss.state_dir import StateDir

__all__ = ["Ledger"]


class Ledger(Protocol):
    """Leases on this node's devices."""

    @property
    def state(self) -> StateDir:
        """Where files and sockets go."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this node."""

    @property
    def store_up(self) -> bool:
        """Whether the lease store answered last."""

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Ask for memory: granted, or queued."""

    async def wait_granted(self, lease: Lease) -> Lease:
        """Wait for a queued lease."""

    async def cancel(self, lease: Lease) -> None:
        """Give up a lease that was never used."""

    async def release(self, lease: Lease) -> None:
        """Give back a lease whose holder is dead and out of the node ledger."""

    async def sweep(self) -> None:
        """Have the keeper look for dead holders now."""

    async def snapshot(self) -> Snapshot:
        """Everything the ledger knows."""
