"""Leases as the store's scripts write them, turned into values and back. Pure.

Called by `gpuboss.client` and `gpuboss.waiting`. In the store a device's name begins with its node's
(`<node>/<device>`), for every host has a `cpu`; callers see their own node's devices by their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpuboss.devices import Device
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import DeviceUse, Fence, HolderKind, Lease, LeaseRequest, LeaseState, Snapshot
from gpuboss.units import format_bytes
from gpuboss.wire import process_from_wire, process_to_wire

__all__ = ["ask_for", "explain_shortage", "lease_from", "snapshot_from"]

Reply = Mapping[str, Any]


def ask_for(request: LeaseRequest, node: str, owner: ProcessIdentity) -> dict[str, Any]:
    """The arguments of the script `acquire`."""
    options = [{f"{node}/{device}": size for device, size in option.items()} for option in request.options]
    return {
        "id": request.request_id,
        "holder": request.holder,
        "kind": request.kind.value,
        "priority": request.priority,
        "node": node,
        "owner": json.dumps(process_to_wire(owner)),
        "options": json.dumps(options),
    }


def lease_from(view: Reply) -> Lease:
    """A script's view of a lease that is not just a memory of one (such have no holder)."""
    shares = json.loads(view["shares"]) if "shares" in view else {}
    return Lease(
        id=view["id"],
        request_id=view["id"],
        holder=view["holder"],
        kind=HolderKind(view["kind"]),
        state=LeaseState(view["state"]),
        shares={_local(device): int(size) for device, size in shares.items()},
        priority=view["priority"],
        fence=Fence(view["epoch"], view["seq"]) if "epoch" in view else None,
        position=view.get("position"),
        owner=process_from_wire(json.loads(view["owner"])),
        since_ms=view["since_ms"],
    )


def snapshot_from(reply: Reply, devices: Sequence[Device]) -> Snapshot:
    """The reply of the script `snapshot`, for the node's own devices."""
    told = {_local(name): use for name, use in reply["devices"].items()}
    uses = [_use_from(device, told[device.id]) for device in devices if device.id in told]
    # An empty Lua table is an empty object in JSON.
    leases = [lease_from(view) for view in reply["leases"] or ()]
    return Snapshot(reply["epoch"], tuple(uses), tuple(leases))


def explain_shortage(shortage: Sequence[Mapping[str, Reply]]) -> str:
    """Why none of the options can ever be granted, per option and device, with numbers."""
    return "; or ".join(
        ", ".join(_explain_one(_local(device), need) for device, need in sorted(option.items())) for option in shortage
    )


def _explain_one(device: str, need: Reply) -> str:
    wanted = format_bytes(int(need["wanted"]))
    if "cap" not in need:
        return f"{wanted} of {device}, which this node does not have"
    cap, total = int(need["cap"]), int(need["total"])
    kept = f" ({format_bytes(total)} less the reserve of {format_bytes(total - cap)})" if total > cap else ""
    enough = " (fits)" if need["wanted"] <= cap else ""
    return f"{wanted} of {device}, which can give {format_bytes(cap)}{kept}{enough}"


def _use_from(device: Device, use: Reply) -> DeviceUse:
    return DeviceUse(
        device=device,
        claimed_bytes=int(use["claimed"]),
        observed_bytes=int(use["observed"]) if device.measured else None,
        foreign_bytes=int(use["foreign"]),
        residual_bytes=int(use["residual"]),
        free_bytes=int(use["free"]),
    )


def _local(device: str) -> str:
    return device.partition("/")[2]
