"""`/api/v1`: what the broker holds, who waits, and an operator's wishes.

Called through FastAPI by the `model-boss` command and by people; reads `inference/pool.py`; `views.py` shapes it.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from coordinator.api import views
from coordinator.broker import Broker
from coordinator.errors import PathUnknown
from coordinator.hangup import HangUp
from gpuboss.priority import NORMAL
from inference.engine_log import last_lines, log_path
from inference.events import Purpose

MOST_LOG_LINES = 1000


def routes(broker: Broker) -> APIRouter:
    """The control endpoints."""
    router = APIRouter(prefix="/api/v1", tags=["control"])
    _add_looks(router, broker)
    _add_wishes(router, broker)
    return router


def _add_looks(router: APIRouter, broker: Broker) -> None:
    @router.get("/slots")
    async def slots() -> dict[str, Any]:
        """Every slot there is: model, state, process, memory."""
        pool = broker.pool
        return {"slots": [views.slot(slot, pool.in_flight(model_id)) for model_id, slot in pool.slots().items()]}

    @router.get("/slots/{model_id:path}")
    async def slot(model_id: str) -> dict[str, Any]:
        """One slot with its story: the latest moves and why."""
        pool = broker.pool
        model = pool.registry.resolve(model_id)
        found = pool.slots().get(model.id)
        if found is None:
            raise PathUnknown(f"model '{model.id}' has no slot: it was not loaded since the broker started")
        return views.slot(found, pool.in_flight(model.id)) | {"story": views.story(found)}

    @router.get("/queue")
    async def queue() -> dict[str, Any]:
        """Who waits, next first."""
        return {"queue": [views.queued(entry) for entry in broker.pool.waiting()]}

    @router.get("/devices")
    async def devices() -> dict[str, Any]:
        """Every device with what is claimed, used and free, by whom, and who uses it without a lease."""
        return views.devices(await broker.pool.devices(), broker.externals.views())

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """Every model that is known, those that cannot be served included, with the reason."""
        return {"models": [views.model(broker, model) for model in broker.pool.registry.models.values()]}

    @router.get("/models/{model_id:path}/logs")
    def logs(model_id: str, lines: Annotated[int, Query(ge=1, le=MOST_LOG_LINES)] = 100) -> dict[str, Any]:
        """The last lines of the engine's log, of its last 64 KiB; those of earlier loads and brokers included."""
        model = broker.pool.registry.resolve(model_id)
        return {"model": model.id, "lines": last_lines(log_path(broker.log_dir, model.id), lines)}


def _add_wishes(router: APIRouter, broker: Broker) -> None:
    @router.post("/models/{model_id:path}/load")
    async def load(model_id: str, request: Request) -> dict[str, Any]:
        """Load the model and answer when it is ready; it queues for its memory like any request."""
        pool = broker.pool
        model = pool.registry.resolve(model_id)
        admission = pool.submit(model, priority=NORMAL, purpose=Purpose.LOAD)
        try:
            with HangUp(request.receive):
                grant = admission.grant_now() or await admission.granted()
        finally:
            admission.close()
        return {
            "model": model.id,
            "state": str(views.state_of(broker, model.id)),
            "queue_ms": round(grant.queue_s * 1000),
            "load_ms": round(grant.load_s * 1000),
        }

    @router.post("/models/{model_id:path}/unload")
    async def unload(model_id: str, request: Request) -> dict[str, Any]:
        """Take the model out of memory and answer when it is gone; requests in flight finish first."""
        pool = broker.pool
        model = pool.registry.resolve(model_id)
        with HangUp(request.receive):
            await pool.unload(model.id)
        return {"model": model.id, "state": str(views.state_of(broker, model.id))}
