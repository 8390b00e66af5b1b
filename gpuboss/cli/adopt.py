"""`gpuboss adopt`: a lease for a process that runs already. Called by the package's `main`.

1. What it and its children use counts as foreign until now, so the request says that these bytes are its own
   (`LeaseRequest.adopts`): on a full device the lease is granted all the same.
2. The node's books name the process itself as the holder. The keeper renews the lease while it lives and frees it at
   its end; this command is gone long before.
"""

from __future__ import annotations

import argparse
import asyncio

from gpuboss import errors, processes
from gpuboss.cli import words
from gpuboss.cli.asking import lost_place
from gpuboss.cli.exits import Exit
from gpuboss.cli.output import connect, print_json
from gpuboss.cli.speech import complain, printable
from gpuboss.cli.views import lease_fields, pids_of
from gpuboss.client import Client
from gpuboss.devices import DeviceKind
from gpuboss.host_lock import read_owner
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HolderKind, Lease, LeaseRequest, LeaseState, Shares, Snapshot, new_request_id
from gpuboss.node_ledger import NodeLedger
from gpuboss.sizing import choose_devices
from gpuboss.units import format_bytes

__all__ = ["adopt"]


def adopt(told: argparse.Namespace) -> int:
    """Give a process a lease."""
    try:
        process = ProcessIdentity.of(told.pid)
    except ProcessLookupError:
        complain(f"there is no process {told.pid} to be seen from here")
        return Exit.NOT_DONE
    return asyncio.run(_adopt(told, process))


async def _adopt(told: argparse.Namespace, process: ProcessIdentity) -> int:
    async with await connect(told) as client:
        keeper = read_owner(client.state.lock_path("keeper"))
        if keeper.pid is not None and keeper.alive and process.pid in processes.family(keeper.pid):
            raise errors.LeaseRefused(f"process {process.pid} is the ledger's own: its keeper, or what the keeper runs")
        await client.sweep()  # so that the figures are of now
        family = processes.family(process.pid)
        if (found := _lease_of(client, process, family)) is not None:
            pid, lease_id = found
            who = f"process {process.pid}"
            if pid != process.pid:
                who = f"process {pid} ({_name_of(pid) or 'ended'}), which descends from {who},"
            raise errors.LeaseRefused(f"{who} is under lease {lease_id} already")
        snapshot = await client.snapshot()
        used = _used(snapshot, family, told.device)
        shares = _shares(told, client, used)
        request = LeaseRequest(
            new_request_id(),
            f"service:{told.name or _name_of(process.pid) or process.pid}",
            HolderKind.SERVICE,
            (shares,),
            told.priority,
            adopts={device_id: size for device_id, size in used.items() if device_id in shares},
        )
        lease = await _granted(client, request, told.wait)
        try:
            lease = await client.activate(lease, process)
        except BaseException:
            await client.release(lease)
            raise
        if told.json:
            print_json(lease_fields(lease, pids_of(client)))
        else:
            held = words.shares(lease.shares, client.devices)
            print(f"{lease.holder} has {held} until process {process.pid} ends (lease {words.short_id(lease.id)})")
    return Exit.DONE


def _name_of(pid: int) -> str:
    return printable(processes.name_of(pid) or "")


def _lease_of(client: Client, process: ProcessIdentity, family: set[int]) -> tuple[int, str] | None:
    """Which of these processes, itself if it may be, holds or carries which lease already."""
    with NodeLedger(client.state.ledger_path) as books:
        rows = books.rows()
    found = [
        (pid, row.lease_id)
        for row in rows
        for pid in (row.pid, row.engine_pid)
        if pid in family and pid is not None and row.pid_namespace == process.pid_namespace
    ]
    carried = processes.carriers([row.lease_id for row in rows])
    found += [(pid, lease_id) for lease_id, pids in carried.items() for pid in pids if pid in family]
    return min(found, key=lambda one: one[0] != process.pid, default=None)


def _used(snapshot: Snapshot, family: set[int], only: list[str] | None) -> dict[str, int]:
    """What the processes use of each device without a lease; host memory only where it is asked for by name."""
    named = {device.id for device in choose_devices([use.device for use in snapshot.devices], only)} if only else None
    found = {}
    for use in snapshot.devices:
        wanted = use.device.kind is not DeviceKind.CPU if named is None else use.device.id in named
        size = sum(stranger.bytes or 0 for stranger in use.foreign_pids if stranger.pid in family)
        if wanted and size:
            found[use.device.id] = size
    return found


def _shares(told: argparse.Namespace, client: Client, used: dict[str, int]) -> Shares:
    """What to claim: what it uses, or what was said, whichever is more. ValueError where that is nothing."""
    if told.vram is None:
        if not used:
            raise ValueError(
                f"process {told.pid} uses no memory of a GPU as far as the drivers tell: "
                "say how much it will use, with --vram 12GiB --device gpu0"
            )
        return used
    names = told.device
    if not names and not used:
        candidates = choose_devices(client.devices)
        if len(candidates) > 1:
            there = ", ".join(words.device_name(device) for device in candidates)
            raise ValueError(f"say which device the {format_bytes(told.vram)} are of: --device, one of {there}")
        names = [candidates[0].id]
    devices = [device.id for device in choose_devices(client.devices, names)] if names else list(used)
    return used | {device_id: max(told.vram, used.get(device_id, 0)) for device_id in devices}


async def _granted(client: Client, request: LeaseRequest, wait_s: float) -> Lease:
    """The lease, granted. Raises WaitExpired with the numbers, and what a client raises; then nothing waits."""
    lease = await client.acquire(request)
    if lease.state is not LeaseState.QUEUED:
        return lease
    try:
        async with asyncio.timeout(wait_s):
            return await client.wait_granted(lease)
    except errors.StaleFence as error:
        raise await lost_place(client, request.holder, lease.id) from error
    except TimeoutError:
        snapshot, option = await client.snapshot(), request.options[0]
        wanted = words.shares(option, client.devices)
        free = [(words.device_name(use.device), use.free_bytes) for use in snapshot.devices if use.device.id in option]
        held = [
            (other.holder, size)
            for other in snapshot.leases
            if (size := sum(size for device, size in other.shares.items() if device in option))
        ]
        await client.cancel(lease)
        raise errors.WaitExpired(
            request.holder, waited_s=wait_s, wanted=wanted, devices=free, holders=sorted(held, key=lambda one: -one[1])
        ) from None
    except BaseException:
        await client.cancel(lease)
        raise
