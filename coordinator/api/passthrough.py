"""An engine's own endpoints: `/upstream/{model}/...` as they are, `/props?model=` and `/slots?model=` by query.

Called by `front.py`. A GET looks, and looking never loads a model nor keeps it warm; a POST is work for the engine like
any inference request, and queues like one. What is in none of the backend's `routes` does not reach an engine: it may
have endpoints that change something for everybody, and a browser asks OPTIONS of anybody for any web page.
"""

from __future__ import annotations

import time
from urllib.parse import unquote

from coordinator import extensions, request, streaming
from coordinator.broker import Broker
from coordinator.errors import BadRequest, MethodRefused, NotLoaded, PathUnknown
from coordinator.exchange import Exchange
from coordinator.extensions import Extensions
from coordinator.hangup import HangUp
from inference.backends import REGISTRY
from inference.errors import ModelNotFound
from inference.events import Purpose
from inference.model import Model
from inference.slot_state import SlotState

UPSTREAM_PREFIX = "/upstream/"
_LOOKING = frozenset({"GET", "HEAD"})


class Look:
    """GET of one engine endpoint, the model by `?model=`."""

    def __init__(self, broker: Broker, path: str) -> None:
        self._broker = broker
        self._path = path

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request.

        Raises:
            CallerError, InferenceError, CallerGone
        """
        asked = extensions.parse({}, exchange.scope["headers"])
        model = self._broker.pool.registry.resolve(request.query_model(exchange))
        await exchange.body()
        await _forward(self._broker, exchange, model, self._path, b"", asked)


class Upstream:
    """Every path that an engine answers itself."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request.

        Raises:
            CallerError, InferenceError, CallerGone
        """
        asked = extensions.parse({}, exchange.scope["headers"])
        model, path = self._split(exchange.scope["raw_path"].decode("latin-1"))
        _check_route(exchange, model, path)
        if query := exchange.scope["query_string"].decode("latin-1"):
            path = f"{path}?{query}"
        await _forward(self._broker, exchange, model, path, await exchange.body(), asked)

    def _split(self, raw_path: str) -> tuple[Model, str]:
        """`/upstream/org/repo/v1/models` -> model `org/repo` and `/v1/models`; the shortest name that is a model."""
        registry = self._broker.pool.registry
        segments = raw_path[len(UPSTREAM_PREFIX) :].split("/")
        first_error: ModelNotFound | None = None
        for count in range(1, len(segments)):
            name = unquote("/".join(segments[:count]))
            if name:
                try:
                    return registry.resolve(request.model_name(name)), "/" + "/".join(segments[count:])
                except ModelNotFound as error:
                    first_error = first_error or error
        raise first_error or PathUnknown(f"{UPSTREAM_PREFIX} is followed by a model's id and a path of its engine")


def _check_route(exchange: Exchange, model: Model, path: str) -> None:
    methods = REGISTRY[model.backend].routes.get(path)
    if methods is None:
        raise PathUnknown(f"{path} is not a path that the engine of '{model.id}' ({model.backend}) may be asked for")
    if ("GET" if exchange.method == "HEAD" else exchange.method) not in methods:
        allow = ", ".join(sorted(methods))
        raise MethodRefused(f"{path} of an engine takes {allow}, not {exchange.method}", allow=allow)


async def _forward(broker: Broker, exchange: Exchange, model: Model, path: str, body: bytes, asked: Extensions) -> None:
    looking = exchange.method in _LOOKING
    pool = broker.pool
    slot = pool.slots().get(model.id)
    state = slot.state if slot is not None else SlotState.IDLE
    if looking and state is not SlotState.READY:
        raise _not_loaded(model.id, state)
    admission = pool.submit(
        model,
        priority=asked.priority,
        client_id=asked.client_id,
        stay_warm_s=None if looking else asked.stay_warm_s,
        purpose=Purpose.PEEK if looking else Purpose.INFER,
    )
    try:
        with HangUp(exchange.receive):
            grant = admission.grant_now() or await admission.granted()
            sent_s = time.monotonic()
            try:
                response = await grant.engine.open(exchange.method, path, body, exchange.scope["headers"])
            except ValueError as error:
                raise BadRequest(f"the engine cannot be asked for this: {error}") from None
            try:
                boss = streaming.boss_headers(exchange.request_id, grant, sent_s)
                await streaming.relay_raw(exchange, response, boss)
            finally:
                response.close()
    finally:
        admission.close()


def _not_loaded(model_id: str, state: SlotState) -> NotLoaded:
    return NotLoaded(
        f"model '{model_id}' is not loaded (it is {state}), and looking does not load it: "
        f"POST /api/v1/models/{model_id}/load, or send it a request",
        param="model",
    )
