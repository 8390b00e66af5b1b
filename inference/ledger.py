"""What slots and the pool need of the ledger of device memory, so that tests can play it.

`gpuboss.client.Client` is the real one; its docstrings say what raises what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gpuboss.devices import Device
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, Lease, LeaseRequest, Shares, Snapshot
from gpuboss.state_dir import StateDir

__all__ = ["ExternalLedger", "Ledger"]


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

    async def acquire(self, request: LeaseRequest, *, order: int | None = None) -> Lease:
        """Ask for memory: granted, or queued; `order` is a place in the queue to be kept."""

    async def wait_granted(self, lease: Lease) -> Lease:
        """Wait for a queued lease."""

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None, priority: int | None = None) -> Lease:
        """Change what a lease asks for or how important it is."""

    async def take_over(self, lease_id: str, fence: Fence) -> Lease:
        """Answer for a lease that another process asked for, and whose holder lives on."""

    def on_notice(self, lease: Lease, callback: Callable[[Lease], None]) -> None:
        """Have the callback told, until the lease is given back, when the lease is to yield and when not any more."""

    async def ack(self, lease: Lease) -> Lease:
        """Say that the lease's notice was heard and its holder is yielding."""

    async def cancel(self, lease: Lease) -> None:
        """Give up a lease that was never used."""

    async def release(self, lease: Lease) -> None:
        """Give back a lease whose holder is dead and out of the node ledger."""

    async def sweep(self) -> None:
        """Have the keeper look for dead holders now."""

    async def snapshot(self) -> Snapshot:
        """Everything the ledger knows."""


class ExternalLedger(Protocol):
    """What programs that we did not start need of it."""

    @property
    def state(self) -> StateDir:
        """Where the node's books are."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this node."""

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Ask for memory: granted, or queued."""

    async def wait_granted(self, lease: Lease) -> Lease:
        """Wait for a queued lease."""

    async def activate(self, lease: Lease, process: ProcessIdentity | None = None) -> Lease:
        """Enter the process that uses the memory in the node's books."""

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None) -> Lease:
        """Change what it holds."""

    def on_notice(self, lease: Lease, callback: Callable[[Lease], None]) -> None:
        """Have the callback told when the lease is to yield, and when not any more."""

    def on_lost(self, lease: Lease, callback: Callable[[Lease], None]) -> None:
        """Have the callback told, once, when the lease has ended without our doing."""

    async def cancel(self, lease: Lease) -> None:
        """Give up a lease that was never used."""

    async def release(self, lease: Lease) -> None:
        """Give back a lease whose process is dead."""

    async def find(self, lease_id: str) -> Lease | None:
        """A lease as it stands."""

    async def sweep(self) -> None:
        """Have the keeper look now."""

    async def snapshot(self) -> Snapshot:
        """Everything the ledger knows."""
