"""From "20 GiB on one GPU" to the options of a lease: which devices could serve it, the most suitable first. Pure.

Called by `gpuboss.taking` and by the command line. A lease without further wishes goes to accelerators; `cpu` serves
it only where it is named, or where the node has nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gpuboss import errors
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse, Shares
from gpuboss.units import format_bytes

__all__ = ["MOST_OPTIONS", "choose_devices", "is_open_choice", "options_for"]

MOST_OPTIONS = 256
"""More alternatives than that are not told to the store: it goes through all of a waiter's at every release."""
_MOST_WEIGHED = 4096
"""Of so many combinations the best are looked for."""
_DESKTOP_SHARE = 16
"""One part in so many of a device may be used by programs without a lease without keeping an exclusive one waiting."""


def options_for(
    devices: Sequence[Device],
    uses: Sequence[DeviceUse] = (),
    *,
    vram_bytes: int | None = None,
    exclusive: bool = False,
    gpus: int = 1,
    only: Sequence[str] | None = None,
) -> tuple[Shares, ...]:
    """The alternatives of a lease on `gpus` devices, `vram_bytes` on each or all of each, best first, at most 256.

    The best is the one that fits now and leaves the least behind, so that large gaps stay for large leases; of those
    that do not fit, the one that lacks the least. `uses` says what is free; without it the devices count as empty.
    `only` names the devices to choose from (ids, or `gpu0`, `gpu1` by index).

    An exclusive lease takes what the owner's reserve leaves of each device, less what programs without a lease use of
    it now, up to a sixteenth of the device: a desktop's few hundred MiB do not keep it waiting for ever.

    Raises LeaseRefused when this node can never serve it, with numbers; ValueError for a request that makes no sense.
    """
    if (vram_bytes is None) == (not exclusive):
        raise ValueError("say how much memory of each device, or that all of it is wanted: one of both")
    if vram_bytes is not None and vram_bytes <= 0:
        raise ValueError(f"{vram_bytes} bytes of memory is nothing to lease")
    if gpus < 1:
        raise ValueError(f"a lease on {gpus} devices is none")
    by_id = {use.device.id: use for use in uses}
    candidates = choose_devices(devices, only)
    wanted = {device.id: vram_bytes or _whole(device, by_id.get(device.id)) for device in candidates}
    able = [device for device in candidates if wanted[device.id] <= _cap(device)]
    if len(able) < gpus:
        raise errors.LeaseRefused(_explanation(candidates, vram_bytes, gpus, named=only is not None))
    spare = {device.id: _free(device, by_id) - wanted[device.id] for device in able}
    able.sort(key=lambda device: _fitness(spare[device.id], device.index))
    weighed = itertools.islice(itertools.combinations(able, gpus), _MOST_WEIGHED)
    best = sorted(weighed, key=lambda chosen: _joint_fitness([spare[device.id] for device in chosen]))
    return tuple(
        {device.id: wanted[device.id] for device in sorted(chosen, key=lambda device: device.index)}
        for chosen in best[:MOST_OPTIONS]
    )


def choose_devices(devices: Sequence[Device], only: Sequence[str] | None = None) -> list[Device]:
    """The devices that a lease may be granted on, in index order.

    Raises LeaseRefused for a name in `only` that no device has.
    """
    in_order = sorted(devices, key=lambda device: device.index)
    if only is None:
        accelerators = [device for device in in_order if device.kind is not DeviceKind.CPU]
        return accelerators or in_order
    by_name = {f"gpu{device.index}": device for device in in_order if device.kind is not DeviceKind.CPU}
    by_name |= {device.id: device for device in in_order}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        there = ", ".join(device.id for device in in_order)
        raise errors.LeaseRefused(f"this node has no device {', '.join(map(repr, unknown))}; it has {there}")
    chosen = {by_name[name].id: by_name[name] for name in only}
    if not chosen:
        raise ValueError("an empty list of devices leaves nothing to lease")
    return sorted(chosen.values(), key=lambda device: device.index)


def is_open_choice(devices: Sequence[Device], *, exclusive: bool, gpus: int, only: Sequence[str] | None) -> bool:
    """Whether `options_for` needs to know what is free: there is a choice, or the size depends on it."""
    candidates = choose_devices(devices, only)
    return len(candidates) > gpus or (exclusive and any(device.measured for device in candidates))


def _cap(device: Device) -> int:
    return device.total_bytes - device.reserve_bytes


def _whole(device: Device, use: DeviceUse | None) -> int:
    foreign = use.foreign_bytes if use else 0
    return max(1, _cap(device) - min(foreign, device.total_bytes // _DESKTOP_SHARE))


def _free(device: Device, by_id: Mapping[str, DeviceUse]) -> int:
    use = by_id.get(device.id)
    return use.free_bytes if use else _cap(device)


def _fitness(spare_bytes: int, index: int) -> tuple[bool, int, int]:
    """Lower is better: fits and leaves little, then lacks little."""
    return spare_bytes < 0, abs(spare_bytes), index


def _joint_fitness(spares: Sequence[int]) -> tuple[int, int, int]:
    """The same for several devices: how many do not fit, what they lack, what the others leave."""
    lacking = [-spare for spare in spares if spare < 0]
    return len(lacking), sum(lacking), sum(spare for spare in spares if spare > 0)


def _explanation(candidates: Sequence[Device], vram_bytes: int | None, gpus: int, *, named: bool) -> str:
    each = "all memory" if vram_bytes is None else format_bytes(vram_bytes)
    wanted = f"{each} of one device" if gpus == 1 else f"{each} of each of {gpus} devices"
    there = ", ".join(f"{device.id} can give {format_bytes(_cap(device))}" for device in candidates) or "it has none"
    few = ""
    if 0 < len(candidates) < gpus:
        few = f", for only {len(candidates)} {'is' if len(candidates) == 1 else 'are'} {'named' if named else 'there'}"
    return f"{wanted} wanted, which this node can never give{few}: {there}"
