"""Values of `inference` and `gpuboss` as the control API shows them. Called by `control.py` and `models.py`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.broker import Broker
from coordinator.lease_desk import PREFIX
from gpuboss.devices import Device
from gpuboss.held import visible_devices
from gpuboss.leases import Lease, Notice, Snapshot
from gpuboss.priority import name_of
from inference.external import ExternalView
from inference.model import Model
from inference.pool import QueueEntry
from inference.slot import Slot
from inference.slot_state import SlotState


def state_of(broker: Broker, model_id: str) -> SlotState:
    """The state of a model's slot; idle where it never had one."""
    found = broker.pool.slots().get(model_id)
    return found.state if found is not None else SlotState.IDLE


def slot(value: Slot, in_flight: int) -> dict[str, Any]:
    """A slot; `devices` is bytes per device, `pid` the engine's and `shim_pid` that of its supervisor."""
    return {
        "model": value.model.id,
        "slot": value.id,
        "state": str(value.state),
        "pid": value.pid,
        "shim_pid": value.shim_pid,
        "devices": dict(value.lease.shares) if value.lease is not None else {},
        "claim_bytes": value.model.claim_bytes,
        "in_flight": in_flight,
        "load_fraction": value.load_fraction,
        "last_load_s": value.last_load_s,
    }


def story(value: Slot) -> list[dict[str, Any]]:
    """A slot's latest moves, oldest first, with the seconds since each."""
    now_s = time.monotonic()
    return [
        {"state": str(move.state), "reason": move.reason, "ago_s": round(now_s - move.at_s, 3)} for move in value.story
    ]


def queued(entry: QueueEntry) -> dict[str, Any]:
    """A waiting ticket."""
    return {
        "position": entry.position,
        "model": entry.ticket.model_id,
        "priority": name_of(entry.ticket.priority),
        "client_id": entry.ticket.client_id,
        "purpose": str(entry.ticket.purpose),
        "waited_s": round(entry.waited_s, 3),
    }


def lease(value: Lease, known: Sequence[Device]) -> dict[str, Any]:
    """A lease; `env` is what its program needs in its environment, `devices` bytes per device."""
    held = [device for device in known if device.id in value.shares]
    env = visible_devices(held) | {"GPUBOSS_LEASE": value.id} if held else {}
    return {
        "id": value.id,
        "request_id": value.request_id.removeprefix(PREFIX),
        "holder": value.holder,
        "kind": str(value.kind),
        "state": str(value.state),
        "priority": name_of(value.priority),
        "devices": dict(value.shares),
        "env": env,
        "preemptible": value.preemptible,
        "grace_s": value.grace_s,
        "ttl_s": value.ttl_s,
        "position": value.position,
        "notice": _notice(value.notice),
        "reason": value.reason,
    }


def _notice(value: Notice | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        "for": value.holder,
        "priority": name_of(value.priority),
        "left_s": round(value.left_s, 3),
        "acknowledged": value.acknowledged,
    }


def external(value: ExternalView) -> dict[str, Any]:
    """A program that we did not start."""
    return {
        "name": value.name,
        "state": str(value.state),
        "pid": value.pid,
        "devices": dict(value.shares),
        "used_bytes": value.used_bytes,
        "busy": value.busy,
        "notice": value.notice,
        "problem": value.problem,
    }


def devices(snapshot: Snapshot, externals: Iterable[ExternalView] = ()) -> dict[str, Any]:
    """The ledger's devices, the leases on them, and the programs beside us.

    `foreign` are the processes that use a device without a lease, largest first; their `bytes` are null where the
    driver does not tell.
    """
    return {
        "epoch": snapshot.epoch,
        "devices": [
            {
                "id": use.device.id,
                "kind": str(use.device.kind),
                "name": use.device.name,
                "measured": use.device.measured,
                "total_bytes": use.device.total_bytes,
                "reserve_bytes": use.device.reserve_bytes,
                "claimed_bytes": use.claimed_bytes,
                "observed_bytes": use.observed_bytes,
                "foreign_bytes": use.foreign_bytes,
                "residual_bytes": use.residual_bytes,
                "quarantined_bytes": use.quarantined_bytes,
                "free_bytes": use.free_bytes,
                "foreign": [
                    {"pid": stranger.pid, "name": stranger.name, "bytes": stranger.bytes}
                    for stranger in use.foreign_pids
                ],
            }
            for use in snapshot.devices
        ],
        "leases": [
            {
                "id": lease.id,
                "holder": lease.holder,
                "kind": str(lease.kind),
                "state": str(lease.state),
                "priority": name_of(lease.priority),
                "devices": dict(lease.shares),
                "position": lease.position,
                "notice": _notice(lease.notice),
            }
            for lease in snapshot.leases
        ],
        "external": [external(value) for value in externals],
    }


def openai_model(broker: Broker, value: Model) -> dict[str, Any]:
    """A model in OpenAI's shape, with what Model Boss knows beside it."""
    return {
        "id": value.id,
        "object": "model",
        "created": int(broker.started_at_s),
        "owned_by": "model-boss",
        "state": str(state_of(broker, value.id)),
        "category": str(value.category),
        "context": value.context,
        "size_bytes": value.file_bytes,
        "claim_bytes": value.claim_bytes,
        "aliases": list(value.aliases),
    }


def model(broker: Broker, value: Model) -> dict[str, Any]:
    """A model with everything an operator wants to know."""
    return {
        "id": value.id,
        "state": str(state_of(broker, value.id)),
        "problem": value.problem,
        "category": str(value.category),
        "backend": value.backend,
        "context": value.context,
        "parallel": value.parallel,
        "size_bytes": value.file_bytes,
        "claim_bytes": value.claim_bytes,
        "claim_basis": value.claim_basis,
        "pin": value.pin,
        "preload": value.preload,
        "stay_warm_s": value.stay_warm_s,
        "aliases": list(value.aliases),
        "source": value.source,
        "in_flight": broker.pool.in_flight(value.id),
    }
