"""`/v1/models`: OpenAI's list with what Model Boss knows of each model beside it. Called through FastAPI."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from coordinator.api import views
from coordinator.broker import Broker


def routes(broker: Broker) -> APIRouter:
    """OpenAI's model endpoints."""
    router = APIRouter(tags=["inference"])

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """Every model that can be asked for, with its state, context and size."""
        models = broker.pool.registry.models.values()
        return {"object": "list", "data": [views.openai_model(broker, model) for model in models if not model.problem]}

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """One model, by id or alias."""
        return views.openai_model(broker, broker.pool.registry.resolve(model_id))

    return router
