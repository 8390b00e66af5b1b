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
from gpuboss.leases import (
    GRACE_S,
    DeviceUse,
    Fence,
    ForeignUse,
    HolderKind,
    Lease,
    LeaseRequest,
    LeaseState,
    Notice,
    Shares,
    Snapshot,
)
from gpuboss.units import format_bytes
from gpuboss.wire import grounds_from_wire, process_from_wire, process_to_wire

__all__ = ["ask_for", "explain_shortage", "lease_from", "options_told", "snapshot_from", "terms_for", "with_owner"]

Reply = Mapping[str, Any]


def ask_for(request: LeaseRequest, node: str, owner: ProcessIdentity) -> dict[str, Any]:
    """The arguments of the script `acquire`."""
    return {
        "id": request.request_id,
        "holder": request.holder,
        "kind": request.kind.value,
        "priority": request.priority,
        "node": node,
        "owner": json.dumps(process_to_wire(owner)),
        "options": options_told(request.options, node),
        "preemptible": request.preemptible,
        "grace_ms": _ms(request.grace_s),
        "lease_ttl_ms": _ms(request.ttl_s or 0),
        "adopts": json.dumps(_named(request.adopts, node)),
    }


def options_told(options: Sequence[Shares], node: str) -> str:
    """Options as the scripts `acquire` and `resize` take them: JSON text, every device named with its node."""
    return json.dumps([_named(option, node) for option in options])


def terms_for(lease: Lease) -> str:
    """What a node's books keep of a lease beyond its shares, as JSON text: the fields that `node_sync` takes in a row.

    A store that forgot the lease gets it back with them.
    """
    return json.dumps(
        {
            "kind": lease.kind.value,
            "priority": lease.priority,
            "preemptible": lease.preemptible,
            "grace_ms": _ms(lease.grace_s),
            "lease_ttl_ms": _ms(lease.ttl_s or 0),
            "order": lease.order,
            "owner": json.dumps(process_to_wire(lease.owner)),
        },
        separators=(",", ":"),
    )


def with_owner(terms: str, owner: ProcessIdentity) -> str:
    """The terms of a row with another owner."""
    told = json.loads(terms) if terms else {}
    return json.dumps(told | {"owner": json.dumps(process_to_wire(owner))}, separators=(",", ":"))


def lease_from(view: Reply) -> Lease:
    """A script's view of a lease that is not just a memory of one (such have no holder)."""
    shares = json.loads(view["shares"]) if "shares" in view else {}
    wants = json.loads(view["wants"]) if "wants" in view else {}
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
        preemptible=view.get("preemptible", False),
        grace_s=view["grace_ms"] / 1000 if "grace_ms" in view else GRACE_S,
        ttl_s=view["lease_ttl_ms"] / 1000 if view.get("lease_ttl_ms") else None,
        order=view.get("order", 0),
        notice=_notice_from(view["notice"]) if "notice" in view else None,
        why=explain_shortage(json.loads(view["why"])) if "why" in view else "",
        node=view.get("node", ""),
        revision=view.get("revision", 0),
        reason=view.get("reason", ""),
        grounds=grounds_from_wire(view["grounds"]) if "grounds" in view else (),
        wants={_local(device): int(size) for device, size in wants.items()},
    )


def snapshot_from(reply: Reply, devices: Sequence[Device]) -> Snapshot:
    """The reply of the script `snapshot`, for the node's own devices."""
    told = {_local(name): use for name, use in reply["devices"].items()}
    uses = [_use_from(device, told[device.id]) for device in devices if device.id in told]
    # An empty Lua table is an empty object in JSON.
    leases = [lease_from(view) for view in reply["leases"] or ()]
    return Snapshot(reply["epoch"], tuple(uses), tuple(leases))


def explain_shortage(shortage: Sequence[Mapping[str, Reply]]) -> str:
    """Why none of the options can be granted, per option and device, with numbers: ever, or, to a holder, now."""
    return "; or ".join(
        ", ".join(_explain_one(_local(device), need) for device, need in sorted(option.items())) for option in shortage
    )


def _explain_one(device: str, need: Reply) -> str:
    wanted = format_bytes(int(need["wanted"]))
    if "free" in need:
        held = f"it holds {format_bytes(int(need['held']))}" if "held" in need else "it holds nothing"
        return f"{wanted} of {device}, where {held} and {format_bytes(int(need['free']))} are free"
    if "cap" not in need:
        return f"{wanted} of {device}, which this node does not have"
    cap, total = int(need["cap"]), int(need["total"])
    kept = f" ({format_bytes(total)} less the reserve of {format_bytes(total - cap)})" if total > cap else ""
    enough = " (fits)" if need["wanted"] <= cap else ""
    return f"{wanted} of {device}, which can give {format_bytes(cap)}{kept}{enough}"


def _notice_from(view: Reply) -> Notice:
    return Notice(
        by=view["by"],
        holder=view["holder"],
        priority=view["priority"],
        since_ms=view["since_ms"],
        left_s=view["left_ms"] / 1000,
        acknowledged=view["acked"],
        outranks=view["outranks"],
    )


def _use_from(device: Device, use: Reply) -> DeviceUse:
    return DeviceUse(
        device=device,
        claimed_bytes=int(use["claimed"]),
        observed_bytes=int(use["observed"]) if device.measured else None,
        foreign_bytes=int(use["foreign"]),
        residual_bytes=int(use["residual"]),
        free_bytes=int(use["free"]),
        quarantined_bytes=int(use.get("quarantined") or 0),
        foreign_pids=tuple(_foreign_from(told) for told in use.get("foreign_pids") or ()),
        unread_s=use.get("unread_s"),
    )


def _foreign_from(told: Reply) -> ForeignUse:
    size = told.get("bytes")
    return ForeignUse(int(told["pid"]), told.get("name", ""), None if size is None else int(size))


def _named(shares: Shares, node: str) -> dict[str, int]:
    return {f"{node}/{device}": size for device, size in shares.items()}


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _local(device: str) -> str:
    return device.partition("/")[2]
