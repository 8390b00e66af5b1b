"""`/api/v1`: what the broker holds, who waits, and an operator's wishes.

Called through FastAPI by the `model-boss` command and by people; reads `inference/pool.py`; `views.py` shapes it.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from coordinator.api import slot_views, views
from coordinator.broker import Broker
from coordinator.errors import PathUnknown
from coordinator.hangup import HangUp
from gpuboss.errors import GpubossError
from gpuboss.priority import NORMAL
from inference.engine_log import last_lines, log_path
from inference.events import Purpose
from inference.slot import Slot

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
        """Every slot there is: model, state, process, memory claimed and used, who waits, how long it stays."""
        peaks = await _peaks(broker)
        return {"slots": [slot_views.shown(broker.pool, slot, peaks) for slot in broker.pool.slots().values()]}

    @router.get("/slots/{slot_id:path}")
    async def slot(slot_id: str) -> dict[str, Any]:
        """One slot (`model`, or `model#2` where there are several) with its story and what its grant rested on."""
        found = _slot(broker, slot_id)
        shown = slot_views.shown(broker.pool, found, await _peaks(broker))
        return shown | {"grounds": await _grounds(broker, found), "story": slot_views.story(found)}

    @router.get("/queue")
    async def queue() -> dict[str, Any]:
        """Who waits, next first."""
        return {"queue": [slot_views.queued(entry) for entry in broker.pool.waiting()]}

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
            "state": str(slot_views.state_of(pool, model.id)),
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
        return {"model": model.id, "state": str(slot_views.state_of(pool, model.id))}


def _slot(broker: Broker, slot_id: str) -> Slot:
    """The slot of that id; a model may be called by an alias."""
    name, mark, number = slot_id.rpartition("#")
    name, number = (name, number) if mark and number.isdigit() else (slot_id, "")
    model = broker.pool.registry.resolve(name)
    full_id = f"{model.id}#{number}" if number else model.id
    found = broker.pool.slots().get(full_id)
    if found is None:
        raise PathUnknown(f"there is no slot '{full_id}': it was not loaded since the broker started")
    return found


async def _grounds(broker: Broker, slot: Slot) -> list[dict[str, Any]] | None:
    """What the grant of its memory rested on; None where it has none, or while the books do not say."""
    if slot.lease is None:
        return None
    try:
        return slot_views.grounds(await broker.books.grounds(slot.lease.id))
    except GpubossError:
        return None


async def _peaks(broker: Broker) -> slot_views.Peaks:
    """What engines were seen to use; nothing while the books do not say, for the rest is worth showing."""
    try:
        return await broker.books.peaks()
    except GpubossError:
        return {}
