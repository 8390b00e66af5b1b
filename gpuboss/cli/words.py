"""What is said to people about leases and devices: names, ages, why somebody waits, who wants the memory back. Pure.

Called by the package's commands. Every sentence carries its numbers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpuboss.cli.speech import printable
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import HOLDS_MEMORY, DeviceUse, HolderKind, Lease, LeaseState, Notice, Shares, Snapshot
from gpuboss.priority import PINNED, name_of
from gpuboss.units import format_bytes

__all__ = [
    *("ago", "device_name", "duration", "foreign", "in_order", "memory", "notice", "shares", "short_id", "short_ids"),
    "waiting",
]

_BOARDS = frozenset({DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.METAL})
_MOST_HOLDERS = 4
"""As many are named in one line; the others are counted."""
_SHORTEST_ID = 12


def device_name(device: Device) -> str:
    """`gpu0` for a board, whose id is a UUID that nobody types; a device's own id otherwise."""
    return f"gpu{device.index}" if device.kind in _BOARDS else device.id


def short_id(lease_id: str) -> str:
    """Enough of a lease's id to name it, where no others are shown."""
    return lease_id[:_SHORTEST_ID]


def short_ids(lease_ids: Iterable[str]) -> dict[str, str]:
    """Of each of these ids as much as names that lease alone: callers of the HTTP API choose how theirs begin."""
    ids = sorted(set(lease_ids))
    alike = [_alike(one, other) for one, other in itertools.pairwise(ids)]  # neighbours are the most alike
    return {
        lease_id: lease_id[: max(_SHORTEST_ID, before + 1, after + 1)]
        for lease_id, before, after in zip(ids, [0, *alike], [*alike, 0], strict=False)
    }


def _alike(one: str, other: str) -> int:
    """How many characters they begin with in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def ago(since_ms: int) -> str:
    """Rough age of a moment on the wall clock: `40s`, `12m`, `3h`, `2d`."""
    return duration(time.time() - since_ms / 1000)


def duration(seconds: float) -> str:
    """The same of a time in seconds."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def shares(held: Shares, devices: Iterable[Device]) -> str:
    """`20GiB of gpu0`, `20GiB of gpu0 and gpu1`, `20GiB of gpu0, 8GiB of cpu`."""
    by_size: dict[int, list[str]] = {}
    for name, size in in_order(held, devices):
        by_size.setdefault(size, []).append(name)
    return ", ".join(f"{format_bytes(size)} of {_and(on)}" for size, on in by_size.items())


def in_order(held: Shares, devices: Iterable[Device]) -> list[tuple[str, int]]:
    """Names and bytes in the order of the devices; those that are none of them come last."""
    known = [device for device in sorted(devices, key=lambda device: device.index) if device.id in held]
    strange = sorted(held.keys() - {device.id for device in known})
    return [(device_name(device), held[device.id]) for device in known] + [(name, held[name]) for name in strange]


def memory(lease: Lease, devices: Iterable[Device]) -> str:
    """What it holds (`gpu0 12GiB, cpu 8GiB`) or waits for: `wants 8GiB`, `wants 2 x 8GiB`, for where is mostly open."""
    sizes = set(lease.wants.values())
    if len(sizes) == 1:
        times = f"{len(lease.wants)} x " if len(lease.wants) > 1 else ""
        return f"wants {times}{format_bytes(sizes.pop())}"
    each = ", ".join(f"{name} {format_bytes(size)}" for name, size in in_order(lease.wants or lease.shares, devices))
    return f"wants {each}" if lease.wants else each or "-"


def waiting(snapshot: Snapshot, lease: Lease, options: Sequence[Shares]) -> str:
    """Why a lease is not granted yet: its place, what it wants, what is free of that, and who holds the rest."""
    free = {use.device.id: use.free_bytes for use in snapshot.devices}
    option = min(options, key=lambda option: _lacking(option, free))
    eligible = {device_id: size for option in options for device_id, size in option.items()}
    uses = [use for use in snapshot.devices if use.device.id in eligible]
    queue = [other for other in snapshot.leases if other.state is LeaseState.QUEUED]
    place = next((other.position for other in queue if other.id == lease.id), lease.position)
    parts = [f"position {place} of {max(len(queue), place or 1)}", _wanted(eligible, len(option), uses)]
    if held := _holders(snapshot.leases, uses):
        parts.append(f"held by {held}")
    if _lacking(option, free) == 0 and (
        ahead := [other.holder for other in queue if (other.position or 0) < (place or 0)]
    ):
        parts.append(f"kept for {_few(ahead)}, who came first")
    return "; ".join(parts)


def foreign(uses: Iterable[DeviceUse]) -> list[str]:
    """One line per process that uses a device without a lease."""
    return [
        f"{device_name(use.device)}: {printable(found.name) or 'a process'} (pid {found.pid}) uses "
        f"{'an unknown amount' if found.bytes is None else format_bytes(found.bytes)} without a lease"
        for use in uses
        for found in use.foreign_pids
    ]


def notice(told: Notice) -> str:
    """Who wants a holder's memory, and how soon."""
    who = told.holder or "a person"
    if told.by:
        who += f" ({name_of(told.priority)})"
    return f"{who} wants this memory back in {max(0.0, told.left_s):.0f} s"


def _wanted(option: Shares, count: int, uses: Sequence[DeviceUse]) -> str:
    """What is wanted of `count` of these devices."""
    sizes = set(option.values())
    if count < len(uses):
        return _wanted_of_some(option, count, uses)
    if len(uses) == 1 or len(sizes) > 1:
        return ", ".join(
            f"{format_bytes(option[use.device.id])} of {device_name(use.device)} wanted, {_free(use)} free"
            for use in uses
        )
    free = _and([f"{device_name(use.device)} ({_free(use)} free)" for use in uses])
    return f"{format_bytes(sizes.pop())} wanted on each of {free}"


def _wanted_of_some(option: Shares, count: int, uses: Sequence[DeviceUse]) -> str:
    names = [device_name(use.device) for use in uses]
    sizes = set(option.values())
    if len(sizes) > 1:  # all of each, whatever its size
        each = ", ".join(
            f"{format_bytes(option[use.device.id])} of {name} ({_free(use)} free)"
            for use, name in zip(uses, names, strict=True)
        )
        return f"{'one' if count == 1 else count} of {each} wanted"
    some = f"one of {', '.join(names)}" if count == 1 else f"each of {count} of {', '.join(names)}"
    most = format_bytes(max(0, sorted((use.free_bytes for use in uses), reverse=True)[count - 1]))
    return f"{format_bytes(sizes.pop())} of {some} wanted, at most {most} free{'' if count == 1 else ' on each'}"


def _free(use: DeviceUse) -> str:
    return format_bytes(max(0, use.free_bytes))


def _lacking(option: Shares, free: Mapping[str, int]) -> int:
    return sum(max(0, size - free.get(device_id, 0)) for device_id, size in option.items())


def _holders(leases: Iterable[Lease], uses: Sequence[DeviceUse]) -> str:
    wanted = {use.device.id for use in uses}
    held: list[tuple[int, str]] = []
    for lease in leases:
        size = sum(size for device_id, size in lease.shares.items() if device_id in wanted)
        if size and lease.state in HOLDS_MEMORY:
            held.append((size, f"{lease.holder} {format_bytes(size)}{_remark(lease)}"))
    for use in uses:
        held += [
            (size, f"{printable(found.name) or 'pid'} ({found.pid}, no lease) {format_bytes(size)}")
            for found in use.foreign_pids
            for size in (found.bytes or 0,)
        ]
        rest = use.foreign_bytes - sum(found.bytes or 0 for found in use.foreign_pids)
        for size, what in (
            (rest, "programs without a lease"),
            (use.residual_bytes - use.quarantined_bytes, "leftovers of holders"),
            (use.quarantined_bytes, "quarantine (ended holders' memory that the driver did not give back)"),
        ):
            if size > 0:
                held.append((size, f"{what} {format_bytes(size)}"))
    held.sort(key=lambda one: -one[0])
    return _few([text for _, text in held])


def is_pinned(lease: Lease) -> bool:
    """Is it that of a model which yields to nobody but to `gpuboss run --over-pinned`?"""
    return lease.kind is HolderKind.SLOT and lease.priority == PINNED


def _remark(lease: Lease) -> str:
    if lease.notice is not None:
        return f" (told to yield, {max(0.0, lease.notice.left_s):.0f} s left)"
    if is_pinned(lease):
        return " (pinned: unload it, or use --over-pinned)"
    return " (not renewed)" if lease.state is LeaseState.ENDING else ""


def _few(names: Sequence[str]) -> str:
    """`a, b, c, d and 3 others`."""
    shown = ", ".join(names[:_MOST_HOLDERS])
    more = len(names) - _MOST_HOLDERS
    return shown if more <= 0 else f"{shown} and {more} {'other' if more == 1 else 'others'}"


def _and(names: Collection[str]) -> str:
    words = list(names)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
