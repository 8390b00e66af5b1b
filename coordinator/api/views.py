"""Devices, leases and models as the control API shows them. Called by `control.py`, `models.py` and `leases.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.api.slot_views import slots_of, state_of
from coordinator.broker import Broker
from coordinator.lease_desk import PREFIX
from gpuboss.devices import Device
from gpuboss.held import visible_devices
from gpuboss.leases import Lease, Notice, Snapshot
from gpuboss.priority import name_of
from inference.external import ExternalView
from inference.model import Model


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
        "state": str(state_of(broker.pool, value.id)),
        "category": str(value.category),
        "context": value.context,
        "size_bytes": value.file_bytes,
        "claim_bytes": value.claim_bytes,
        "aliases": list(value.aliases),
    }


def model(broker: Broker, value: Model) -> dict[str, Any]:
    """A model with everything an operator wants to know.

    `problem`: why it cannot be served. `manifest_problem`: why the present version of its manifest is not in force.
    `never_fits`: why it can never be loaded here, whatever else is gone.
    """
    return {
        "id": value.id,
        "state": str(state_of(broker.pool, value.id)),
        "problem": value.problem,
        "manifest_problem": broker.pool.registry.outdated.get(value.id),
        "never_fits": broker.pool.never_fits(value.id),
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
        "replicas": value.replicas,
        "in_flight": sum(broker.pool.in_flight(slot.id) for slot in slots_of(broker.pool, value.id)),
    }
