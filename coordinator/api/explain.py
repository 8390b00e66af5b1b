"""`GET /api/v1/explain`: what would become of a request now, in numbers: would it wait, for what, who would go.

Called through FastAPI by `model-boss explain` and by people; `inference/explain.py` tries it out on a copy of the live
state, so that looking changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from coordinator import request
from coordinator.broker import Broker
from coordinator.errors import BadRequest
from coordinator.hangup import HangUp
from gpuboss.priority import name_of, parse_priority
from inference.explain import Blocker, DeviceShare, Explanation, Victim

LONGEST_PRIORITY = 64
"""Characters of it that are looked at, and repeated."""


def routes(broker: Broker) -> APIRouter:
    """The endpoint."""
    router = APIRouter(prefix="/api/v1", tags=["control"])

    @router.get("/explain")
    async def explain(
        asked: Request,
        model: Annotated[str | None, Query(description="A model's id or alias; the default one when left out.")] = None,
        priority: Annotated[str, Query(description="A class, or 0 to 1000.")] = "normal",
    ) -> dict[str, Any]:
        """What would become of a request for the model in that class, if it came now."""
        wanted = request.resolve(broker.pool.registry, request.model_name(model))
        try:
            number = parse_priority(priority[:LONGEST_PRIORITY])
        except ValueError as error:
            raise BadRequest(str(error), param="priority") from None
        with HangUp(asked.receive):
            return shown(await broker.pool.explain(wanted, number))

    return router


def shown(value: Explanation) -> dict[str, Any]:
    """An explanation as JSON; `options` is where the model would be loaded, bytes by device, best first."""
    return {
        "model": value.model_id,
        "priority": name_of(value.priority),
        "verdict": str(value.verdict),
        "need_bytes": value.need_bytes,
        "position": value.position,
        "waiting": value.waiting,
        "eta_s": round(value.eta_s, 3) if value.eta_s is not None else None,
        "options": [dict(option) for option in value.options],
        "victims": [_victim(victim) for victim in value.victims],
        "blocked_by": [_blocker(blocker) for blocker in value.blocked_by],
        "devices": [_device(device) for device in value.devices],
        "refusal": value.refusal,
    }


def _victim(value: Victim) -> dict[str, Any]:
    return {
        "slot": value.slot_id,
        "model": value.model_id,
        "freed_bytes": value.freed_bytes,
        "priority": name_of(value.priority),
        "in_flight": value.in_flight,
        "idle_s": round(value.idle_s, 3) if value.idle_s is not None else None,
        "reload_s": value.reload_s,
    }


def _blocker(value: Blocker) -> dict[str, Any]:
    return {"name": value.name, "held_bytes": value.held_bytes, "why": value.why}


def _device(value: DeviceShare) -> dict[str, Any]:
    return {
        "id": value.id,
        "total_bytes": value.total_bytes,
        "reserve_bytes": value.reserve_bytes,
        "others_bytes": value.others_bytes,
        "claimed_bytes": value.claimed_bytes,
        "free_bytes": value.free_bytes,
    }
