"""`gpuboss release`: ask for a lease back, or take it. Called by the package's `main`.

1. A waiter leaves the queue.
2. A holder gets a notice, as if somebody more important wanted its memory. What it does then is its affair: `gpuboss
   run` ends its command, a model slot drains, a program that uses the library hears of it. An adopted process hears
   nothing, so it is not asked.
3. With --force the holder's processes are ended here, after a question: SIGTERM, then SIGKILL. The keeper sees that
   they are gone and frees the lease; nothing is freed on our word.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import os
import signal
import sys
import time
from pathlib import Path

from gpuboss import processes
from gpuboss.cli import words
from gpuboss.cli.exits import Exit
from gpuboss.cli.output import connect, print_json
from gpuboss.cli.speech import complain, escaped
from gpuboss.cli.views import lease_fields, pids_of
from gpuboss.client import Client
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import OVER, HolderKind, Lease, LeaseState, Snapshot
from gpuboss.ledger_rows import LedgerRow
from gpuboss.node_ledger import NodeLedger

__all__ = ["release"]

_FORCED_GRACE_S = 10.0
_FREED_S = 10.0
"""How long the keeper may take to see that a lease's processes are gone."""
_LOOK_S = 0.1


def release(told: argparse.Namespace) -> int:
    """Give a lease back in its holder's place."""
    return asyncio.run(_release(told))


async def _release(told: argparse.Namespace) -> int:
    async with await connect(told) as client:
        snapshot = await client.snapshot()
        found = _find(snapshot, told.lease)
        if len(found) != 1:
            complain(_not_one(told.lease, found, snapshot))
            return Exit.NOT_DONE
        lease = found[0]
        if lease.state is LeaseState.QUEUED:  # 1
            await client.cancel(lease)
            return await _tell(told, client, lease, f"{lease.holder} waits no more")
        if told.force:
            return await _take(told, client, lease)
        if _is_adopted(lease, _row_of(client, lease)):
            complain(f"{lease.holder} is adopted: an adopted process cannot be asked to yield; --force ends it")
            return Exit.REFUSED
        asked = await client.preempt(lease.id, by=f"{_user()} (gpuboss release)", grace_s=told.grace)  # 2
        left_s = asked.notice.left_s if asked.notice is not None else asked.grace_s
        held = words.shares(lease.shares, client.devices)
        text = (
            f"{lease.holder} is asked to give back {held} within {max(0.0, left_s):.0f} s; "
            f"`gpuboss release {lease.id} --force` ends it"
        )
        return await _tell(told, client, lease, text)


def _find(snapshot: Snapshot, name: str) -> list[Lease]:
    exact = [lease for lease in snapshot.leases if name == lease.id]
    return exact or [lease for lease in snapshot.leases if lease.id.startswith(name) or _is_called(lease, name)]


def _is_called(lease: Lease, name: str) -> bool:
    """Whether that is its holder's name: in full, or without what kind of holder it is."""
    return name in (lease.holder, lease.holder.partition(":")[2])


def _row_of(client: Client, lease: Lease) -> LedgerRow | None:
    with NodeLedger(client.state.ledger_path) as books:
        return next((row for row in books.rows() if row.lease_id == lease.id), None)


def _is_adopted(lease: Lease, row: LedgerRow | None) -> bool:
    """Whether nobody would hear a notice: it was asked for by another process, `gpuboss adopt`, which has ended.

    A broker asks for programs too, and the next one listens for those of the one before; but what it can have freed is
    pre-emptible, as nothing adopted is.
    """
    return (
        lease.kind is HolderKind.SERVICE
        and not lease.preemptible
        and row is not None
        and row.process not in (None, lease.owner)
        and lease.owner.is_alive() is Liveness.DEAD
    )


def _not_one(name: str, found: list[Lease], snapshot: Snapshot) -> str:
    if not found:
        return f"there is no lease {name!r}: `gpuboss ps` shows those there are"
    ids = words.short_ids(lease.id for lease in snapshot.leases)
    those = ", ".join(f"{ids[lease.id]} ({lease.holder})" for lease in found)
    return f"{name!r} may be any of {those}: say more of its id"


def _user() -> str:
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return f"user {os.geteuid()}"


async def _tell(told: argparse.Namespace, client: Client, lease: Lease, text: str) -> int:
    if told.json:
        print_json(lease_fields(await client.find(lease.id) or lease, pids_of(client)))
    else:
        print(text)
    return Exit.DONE


# -- 3 -----------------------------------------------------------------------------------------------------------------


async def _take(told: argparse.Namespace, client: Client, lease: Lease) -> int:
    """End the holder's processes, and see the lease freed."""
    recorded = _recorded(_row_of(client, lease))
    pids = _living(lease, recorded)
    if not _confirmed(told, lease, pids):
        return Exit.REFUSED
    if pids:
        await _end(lease, recorded, _FORCED_GRACE_S if told.grace is None else told.grace)
    else:
        # Granted and not used yet, or held by word alone: there is nobody to end, so the word is taken back.
        await client.release(lease)
    deadline_s = time.monotonic() + _FREED_S
    while True:
        await client.sweep()
        now = await client.find(lease.id)
        if now is None or now.state in OVER:
            return await _tell(told, client, lease, f"{lease.holder} is ended and its memory given back")
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_LOOK_S)
    left = ", ".join(map(str, sorted(_living(lease, recorded)))) or "none that is to be seen from here"
    complain(f"{lease.holder} still holds its memory; its processes: {left}")
    return Exit.NOT_DONE


def _recorded(row: LedgerRow | None) -> list[ProcessIdentity]:
    return [] if row is None else [process for process in (row.process, row.engine) if process is not None]


def _living(lease: Lease, recorded: list[ProcessIdentity]) -> set[int]:
    alive = {process.pid for process in recorded if process.is_alive() is Liveness.ALIVE}
    return alive | set(processes.carriers([lease.id]).get(lease.id, ()))


async def _end(lease: Lease, recorded: list[ProcessIdentity], grace_s: float) -> None:
    for pid in _living(lease, recorded):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
    deadline_s = time.monotonic() + grace_s
    # Nobody tells us of other people's children.
    while _living(lease, recorded) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    await processes.end_processes(lease.id, recorded)


def _confirmed(told: argparse.Namespace, lease: Lease, pids: set[int]) -> bool:
    if told.yes:
        return True
    text = "\n".join(f"  {pid:>7}  {_command_line(pid)}" for pid in sorted(pids)) or "  no process"
    print(f"{lease.holder}, lease {lease.id}:\n{text}", file=sys.stderr)
    if not sys.stdin.isatty():
        complain("nothing is ended without confirmation: add --yes")
        return False
    print("end these and take the memory back? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = processes.name_of(pid) or "?"
    return escaped(words)  # they could hide what is asked, or write an answer of their own
