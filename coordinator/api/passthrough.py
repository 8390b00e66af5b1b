"""An engine's own endpoints: `/upstream/{model}/...` as they are, `/props?model=` and `/slots?model=` by query.

Called by `front.py`. A GET looks, and looking never loads a model nor keeps it warm; a POST is work for the engine like
any inference request, and queues like one. What is in none of the backend's `routes` does not reach an engine: it may
have endpoints that change something for everybody, and a browser asks OPTIONS of anybody for any web page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import unquote

from coordinator import budget, extensions, request, streaming
from coordinator.api import slot_views
from coordinator.broker import Broker
from coordinator.errors import BadRequest, MethodRefused, NotLoaded, PathUnknown
from coordinator.exchange import Exchange, Headers
from coordinator.extensions import Extensions
from coordinator.hangup import HangUp
from inference.backends import REGISTRY
from inference.errors import ModelNotFound
from inference.model import Model
from inference.proxy import EngineClient
from inference.slot_state import SlotState

UPSTREAM_PREFIX = "/upstream/"
_LOOKING = frozenset({"GET", "HEAD"})
_LOOKED_AT = frozenset({SlotState.READY, SlotState.DRAINING})
"""States in which an engine answers."""


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
        extensions.parse({}, exchange.scope["headers"])  # what is none of them is refused here too
        model = self._broker.pool.registry.resolve(request.query_model(exchange))
        await exchange.body()
        await _look(self._broker, exchange, model, self._path)


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
        body = await exchange.body()
        if exchange.method in _LOOKING:
            await _look(self._broker, exchange, model, path)
        else:
            await _forward(self._broker, exchange, model, path, body, asked)

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
    admission = broker.pool.submit(
        model,
        priority=asked.priority,
        client_id=asked.client_id,
        stay_warm_s=asked.stay_warm_s,
        session_id=asked.session_id,
        cooldown_s=asked.cooldown_s,
    )
    try:
        with HangUp(exchange.receive):
            grant = admission.grant_now() or await admission.granted()
            sent_s = time.monotonic()
            answer = _answer(
                exchange,
                grant.engine,
                path,
                body,
                boss=lambda: streaming.boss_headers(exchange.request_id, grant, sent_s),
            )
            await budget.spend(asked.budget_s, model.id, answer)
    finally:
        admission.close()


async def _look(broker: Broker, exchange: Exchange, model: Model, path: str) -> None:
    """Ask an engine that runs. A look has no ticket: it would wait for the very work that it is to show."""
    slots = slot_views.slots_of(broker.pool, model.id)
    slot = next((slot for slot in slots if slot.state in _LOOKED_AT and slot.engine is not None), None)
    if slot is None or slot.engine is None:
        raise _not_loaded(model.id, slot_views.state_of(broker.pool, model.id))
    boss = [(b"x-request-id", exchange.request_id), (b"x-boss-model", model.id.encode())]
    boss.append((b"x-boss-slot", slot.id.encode()))
    with HangUp(exchange.receive):
        await _answer(exchange, slot.engine, path, b"", boss=lambda: boss)


async def _answer(
    exchange: Exchange, engine: EngineClient, path: str, body: bytes, *, boss: Callable[[], Headers]
) -> None:
    try:
        response = await engine.open(exchange.method, path, body, exchange.scope["headers"])
    except ValueError as error:
        raise BadRequest(f"the engine cannot be asked for this: {error}") from None
    try:
        await streaming.relay_raw(exchange, response, boss())
    finally:
        response.close()


def _not_loaded(model_id: str, state: SlotState) -> NotLoaded:
    now = "" if state is SlotState.IDLE else f" (it is {state})"
    return NotLoaded(
        f"model '{model_id}' is not loaded{now}, and looking does not load it: "
        f"POST /api/v1/models/{model_id}/load, or send it a request",
        param="model",
    )
