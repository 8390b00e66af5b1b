"""The wait of `gpuboss run`, and what is shown of it meanwhile.

Called by `gpuboss.cli.supervise`; `gpuboss.taking` does the asking, as for `gpuboss.hold`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from gpuboss import errors, taking
from gpuboss.cli import words
from gpuboss.cli.progress import Progress
from gpuboss.client import Client
from gpuboss.devices import DeviceKind
from gpuboss.leases import Lease, LeaseState
from gpuboss.sizing import choose_devices
from gpuboss.taking import Wish
from gpuboss.units import GIB, MIB, format_bytes, whole_mib

__all__ = ["lost_place", "obtain", "refuse_what_never_fits", "tell_of_host_memory"]

_PATIENCE_S = 0.2
"""Nobody is told of shorter waits."""
_TELL_S = 1.0
"""Between two looks at why we wait."""


async def obtain(client: Client, wish: Wish, progress: Progress) -> Lease:
    """A lease that this process holds; while it is waited for, `progress` shows why.

    Raises what `taking.take` raises. Whatever it raises, also when it is cancelled, nothing is left of what was asked.
    """
    began_s = time.monotonic()
    seen: list[str] = []
    telling = asyncio.create_task(_tell(client, wish, progress, seen), name="gpuboss-progress")
    try:
        lease = await taking.take(client, wish)
    except errors.StaleFence as error:  # nobody here has given it up
        raise await lost_place(client, wish.holder, seen[-1] if seen else None) from error
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        progress.clear()
    if progress.told_to_wait:
        held, waited = words.shares(lease.shares, client.devices), words.duration(time.monotonic() - began_s)
        progress.say(f"{wish.holder} has {held}, after {waited}")
    return lease


async def lost_place(client: Client, holder: str, lease_id: str | None) -> errors.StaleFence:
    """Why a waiter is none any more that has not given up: a person's doing, or that of the store's clock."""
    lease = None
    with contextlib.suppress(errors.GpubossError):
        lease = lease_id and await client.find(lease_id)
    if lease and lease.reason == "expired":
        why = "lost its place in the queue: the store had not heard of this host for longer than a lease lives"
    else:
        why = "was taken out of the queue (gpuboss release)"
    return errors.StaleFence(f"{holder} {why}")


def refuse_what_never_fits(client: Client, wish: Wish) -> None:
    """Raise LeaseRefused for what these devices can never give, with what to ask for instead."""
    candidates = choose_devices(client.devices, wish.only)
    try:
        wish.request(client.devices)
    except errors.LeaseRefused as error:
        sizes = [device.total_bytes - device.reserve_bytes for device in candidates]
        raise errors.LeaseRefused(f"{error.message}. {_remedy(wish, sorted(sizes, reverse=True))}") from None


def _remedy(wish: Wish, sizes: Sequence[int]) -> str:
    """What could be asked for where the devices to choose from can give `sizes`, the largest first."""
    size = wish.vram_bytes or 0
    if wish.gpus > len(sizes) > 0:
        less = "less, and for " if size > sizes[-1] else ""
        more = "" if wish.only is None else ", or name more with --device"
        return f"Ask for {less}fewer devices: --gpus {len(sizes)}{more}"
    for gpus in range(wish.gpus + 1, len(sizes) + 1):
        each = whole_mib(-(-size * wish.gpus // gpus))
        if each <= sizes[gpus - 1]:
            shown = f"{each // GIB}GiB" if each % GIB == 0 else f"{each // MIB}MiB"  # in full, for it is typed in
            return f"Ask for less, or spread it over more devices: --gpus {gpus} --vram {shown}"
    return "Ask for less"


def tell_of_host_memory(client: Client, wish: Wish, progress: Progress) -> None:
    """Say that host memory is leased because no GPU was found, unless it was asked for by name.

    Raises LeaseRefused for what can never be granted.
    """
    if wish.only is None and all(device.kind is DeviceKind.CPU for device in client.devices):
        (option, *_) = wish.request(client.devices).options
        size = format_bytes(sum(option.values()))
        progress.insist(f"no GPU was found: {size} of host memory (cpu) is leased instead; see gpuboss doctor")


async def _tell(client: Client, wish: Wish, progress: Progress, seen: list[str]) -> None:
    """Show why we wait, until cancelled. `seen`: the ids under which we did."""
    await asyncio.sleep(_PATIENCE_S)
    while True:
        try:
            snapshot = await client.snapshot()
            for lease in snapshot.leases:
                if lease.owner == client.owner and lease.state is LeaseState.QUEUED:
                    if lease.id not in seen:
                        seen.append(lease.id)
                    options = wish.request(client.devices, snapshot.devices).options
                    progress.waiting(words.waiting(snapshot, lease, options), place=lease.position)
        except errors.GpubossError as error:  # such as a store that is away
            progress.waiting(error.message, place=None)
        await asyncio.sleep(_TELL_S)
