"""What an inference request asks for: which model, how, and the bytes its engine gets.

Called by `api/infer.py`. The body is parsed once. Where nothing in it concerns Model Boss, the caller's own bytes go to
the engine; otherwise `model` and the `x_...` fields alone are touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qs

import orjson

from coordinator import extensions
from coordinator.errors import BadJson, BadRequest, MediaTypeRefused
from coordinator.exchange import Exchange
from coordinator.extensions import Extensions
from inference.errors import ModelNotFound
from inference.model import Model

LONGEST_MODEL_NAME = 256


class Resolver(Protocol):
    """The part of the registry that turns names into models."""

    def resolve(self, name: str | None) -> Model:
        """The model of that name or alias, the default for None; raises `inference.errors`."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that has been understood."""

    model: Model
    body: bytes
    """For the engine."""
    stream: bool
    """The caller wants server-sent events, so comments may tell them how long they wait."""
    extensions: Extensions


async def understand(exchange: Exchange, registry: Resolver) -> Wanted:
    """Read and check a JSON request for a model.

    Raises:
        CallerError, inference.errors.ModelNotFound, inference.errors.ModelBroken
    """
    raw = await exchange.body()
    body = parse_object(raw)
    asked = extensions.parse(body, exchange.scope["headers"])
    name = body.get("model")
    model = resolve(registry, model_name(name) or query_model(exchange))
    if name != model.id or any(key.startswith(extensions.BODY_PREFIX) for key in body):
        raw = orjson.dumps(extensions.without(body) | {"model": model.id})
    return Wanted(model, raw, body.get("stream") is True, asked)


def resolve(registry: Resolver, name: str | None) -> Model:
    """The model of that name, or the default one.

    Raises:
        ModelNotFound: there is none of that name.
        BadRequest: no name, and no default.
    """
    try:
        return registry.resolve(name)
    except ModelNotFound as error:
        if name is None:  # not a wrong name, but a request that cannot be served as it is
            raise BadRequest(error.message, param="model") from None
        raise


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises:
        BadJson: it says where the fault is, and never repeats what the caller wrote.
    """
    if not raw:
        raise BadJson("the request body is empty; a JSON object is expected")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # `from None`: the cause carries the whole body, which must not reach a log.
        raise BadJson(
            f"the request body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno} "
            f"(character {error.pos})"
        ) from None
    if not isinstance(body, dict):
        raise BadJson(f"the request body is a JSON {_NAMES[type(body)]}; an object is expected")
    return body


def model_name(name: object) -> str | None:
    """The name as given, checked; None for the default model.

    Raises:
        BadRequest: not a name.
    """
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_MODEL_NAME:
        raise BadRequest(f"model must be a string of 1 to {LONGEST_MODEL_NAME} characters", param="model")
    return name


def query_model(exchange: Exchange) -> str | None:
    """The name in `?model=`, None where there is none."""
    return model_name(_query(exchange).get("model"))


def says_json(content_type: bytes | None) -> bool:
    """True when a Content-Type header means JSON."""
    if content_type == b"application/json":
        return True
    return content_type is not None and content_type.split(b";")[0].strip().lower() == b"application/json"


def not_json(headers: Mapping[bytes, bytes]) -> MediaTypeRefused:
    """The error for a body that does not say it is JSON: browsers may send others across sites without asking."""
    got = headers.get(b"content-type", b"none").decode("latin-1")[:80]
    return MediaTypeRefused(f"the request's Content-Type is {got}; send -H 'Content-Type: application/json'")


def _query(exchange: Exchange) -> dict[str, str]:
    query: bytes = exchange.scope["query_string"]
    if not query:
        return {}
    return {key: values[-1] for key, values in parse_qs(query.decode("latin-1")).items()}  # short: heads are limited


_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
