"""Everything a shim needs to start an engine under a lease.

Called by `engine_run.py`; asks the backend for the command.
"""

from __future__ import annotations

from pathlib import Path

from gpuboss.lease_wire import terms_for
from gpuboss.leases import Lease
from inference.backends import Backend, Launch
from inference.errors import LoadFailed
from inference.ledger import Ledger
from inference.model import Model
from inference.process import LaunchOrder, LeaseOrder

__all__ = ["launch_order"]


def launch_order(
    model: Model, backend: Backend, binary: Path, ledger: Ledger, lease: Lease, *, socket: Path, key: str, log: Path
) -> LaunchOrder:
    """The order. Files that the engine finds or makes are private.

    Raises:
        LoadFailed: the state directory takes no folder.
        ModelBroken: the manifest says what the backend cannot do.
    """
    assert lease.fence is not None, "a granted lease has a fence"
    home = ledger.state.root / "engine-home"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LoadFailed(
            f"'{model.id}' cannot be started: {home.name} cannot be made in the state directory ({error.strerror})"
        ) from error
    place = Launch(binary, socket, key, shares=lease.shares, devices=ledger.devices, home=home)
    command = backend.command(model, place)
    fence = lease.fence
    return LaunchOrder(
        argv=command.argv,
        env={**command.env, "GPUBOSS_LEASE": lease.id},
        cwd=str(home),
        log=str(log),
        socket=str(socket),
        lease=LeaseOrder(lease.id, fence.epoch, fence.seq, lease.holder, dict(lease.shares), terms_for(lease)),
    )
