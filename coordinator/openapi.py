"""Puts the raw endpoints, which bypass FastAPI and are unknown to it, into `/docs`. Called by `app.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from coordinator import extensions
from coordinator.front import Handler


@dataclass(frozen=True, slots=True)
class RawEndpoint:
    """A raw endpoint and what `/docs` says of it."""

    method: str
    path: str
    handler: Handler
    summary: str
    example: dict[str, Any] | None = None
    """A request body that works; None where there is no body."""
    by_query: bool = False
    """The model is named by `?model=`."""


def document(app: FastAPI, endpoints: tuple[RawEndpoint, ...]) -> None:
    """Make `app.openapi()` describe the raw endpoints too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _add_components(schema)
            for endpoint in endpoints:
                schema["paths"].setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way to extend the schema


def _add_components(schema: dict[str, Any]) -> None:
    """Model Boss's own fields, once: what stands in bodies, and what stands in headers."""
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["ModelBossFields"] = {
        "type": "object",
        "description": "What Model Boss adds to the engine's own fields. Each may be a header instead.",
        "properties": {
            extensions.BODY_PREFIX + name: {**field.schema, "description": field.words}
            for name, field in extensions.FIELDS.items()
        },
    }
    components["parameters"] = {
        _header(name): {
            "name": _header(name),
            "in": "header",
            "required": False,
            "description": field.words,
            "schema": field.schema,
        }
        for name, field in extensions.FIELDS.items()
    }


def _header(field: str) -> str:
    """`client_id` -> `X-Boss-Client-Id`"""
    return f"{extensions.HEADER_PREFIX.decode()}{field.replace('_', '-')}".title()


def _operation(endpoint: RawEndpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": ["inference"],
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The engine's answer"},
            "default": {"description": '`{"error": {"message", "type", "code", "param"}}`'},
        },
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in ("model", "path")
            if f"{{{name}}}" in endpoint.path
        ],
    }
    if endpoint.by_query:
        operation["parameters"].append({"name": "model", "in": "query", "schema": {"type": "string"}})
    operation["parameters"] += [{"$ref": f"#/components/parameters/{_header(name)}"} for name in extensions.FIELDS]
    if endpoint.example is not None:
        # What goes through as it is has none of our fields in its body.
        schema = {"type": "object"} if "{path}" in endpoint.path else {"$ref": "#/components/schemas/ModelBossFields"}
        content = {"schema": schema, "example": endpoint.example}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation
