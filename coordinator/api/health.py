"""`/health` and `/health/ready`: for load balancers and supervisors. They never touch an engine or the store."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from coordinator.api.slot_views import state_of
from coordinator.broker import Broker
from inference.slot_state import SlotState


def routes(broker: Broker) -> APIRouter:
    """The health endpoints."""
    router = APIRouter(tags=["health"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while the broker can take requests; 503 with the reason while it cannot."""
        problems = _problems(broker)
        body = {
            "status": "unhealthy" if problems else "ok",
            "problems": problems,
            "uptime_s": round(time.time() - broker.started_at_s, 1),
        }
        return JSONResponse(body, status_code=503 if problems else 200)

    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 once, beyond that, every pinned model is loaded."""
        problems = _problems(broker)
        for model in broker.pool.registry.models.values():
            state = state_of(broker.pool, model.id)
            if model.pin and state is not SlotState.READY:
                problems.append(f"pinned model {model.id} is {state}")
        return JSONResponse({"ready": not problems, "problems": problems}, status_code=503 if problems else 200)

    return router


def _problems(broker: Broker) -> list[str]:
    problems = []
    if broker.stopping:
        problems.append("shutting down")
    if not broker.pool.store_up:
        problems.append("the lease store does not answer; loaded models are served, others wait")
    return problems
