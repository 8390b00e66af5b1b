"""The one place where the program's objects are built and wired.

`create_app(settings)` is called by `server.py`; tests call `assemble` with a pool of their own. From here: `front.py`
is the first code a request meets, `api/` holds the endpoints, `inference/pool.py` does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from coordinator import openapi
from coordinator.api import control, explain, health, leases, models, raw, trace
from coordinator.broker import Broker, Parts
from coordinator.errors import BadJson, BadRequest, MethodRefused, PathUnknown
from coordinator.front import Front
from coordinator.lease_desk import LeaseDesk
from coordinator.security import Gate
from coordinator.settings import Settings
from gpuboss.client import Client
from gpuboss.devices import Device, DeviceKind
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import StateDir
from inference.engines import find_llama_server
from inference.externals import Externals
from inference.learned import Learned
from inference.pool import Pool
from inference.process import Shims
from inference.queue import QueueLimits
from inference.registry import Changes, Registry, Room
from inference.scheduler import Scheduler
from inference.simulation.recorder import Recorder
from inference.slot_maker import SlotMaker
from inference.validation import explained
from inference.watch import watch

_DESCRIPTION = "Local models behind one OpenAI-compatible API, loaded and evicted inside a memory budget."
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI would send requests to whatever OTEL_... in the environment names, and asks for it on each of them."""

_log = structlog.get_logger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The whole broker as an ASGI application; its lifespan starts and ends the pool.

    The lifespan raises GpubossError and InferenceError, each with its remedy, when the pool cannot start.
    """
    gate = Gate(api_key=settings.api_key, host=settings.host, port=settings.port, allowed_hosts=settings.allowed_hosts)
    broker = Broker(lambda: _running(settings), log_dir=StateDir.resolve(settings.state_dir).log_dir)
    return assemble(broker, gate, access_log=settings.log_level == "debug")


def assemble(broker: Broker, gate: Gate, *, access_log: bool = False) -> FastAPI:
    """The application around a broker; `app.state.broker` is that broker."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await broker.startup()
        try:
            yield
        finally:
            await broker.shutdown()

    app = FastAPI(
        title="Model Boss",
        version=version("model-boss"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    app.state.broker = broker
    for family in (models, health, control, explain, trace, leases):
        app.include_router(family.routes(broker))
    endpoints = raw.endpoints(broker)
    openapi.document(app, endpoints)
    app.add_middleware(Front, gate=gate, routes=raw.routes(endpoints), access_log=access_log)
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


@contextlib.asynccontextmanager
async def _running(settings: Settings) -> AsyncIterator[Parts]:
    """All that works, from the ledger up; ended in reverse."""
    ledger = await Client.connect(
        LedgerSettings(
            state_dir=settings.state_dir,
            devices=settings.device_specs(),
            store_url=settings.store,
            reserve_bytes=settings.reserve_bytes,
        ),
        name="model-boss",
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(ledger.close)
        registry = Registry.load(settings.model_sources(), _largest_room(ledger.devices))
        for problem in (*registry.problems, *registry.warnings):
            _log.warning("models_problem", problem=str(problem))
        learned = Learned(ledger, registry)
        await learned.startup()
        pool = _make_pool(settings, registry, ledger)
        stack.push_async_callback(pool.shutdown)
        await pool.startup()
        await stack.enter_async_context(_beside(_watch(registry, pool), "model-watch"))
        learning = learned.main_loop(pool.serving, pool.models_changed)
        await stack.enter_async_context(_beside(learning, "peaks-learned"))
        desk = LeaseDesk(ledger)
        stack.push_async_callback(desk.close)
        externals = Externals(settings.external_specs(), ledger)
        externals.startup()
        stack.push_async_callback(externals.shutdown)
        yield Parts(pool, desk, externals, ledger)


def _make_pool(settings: Settings, registry: Registry, ledger: Client) -> Pool:
    limits = QueueLimits(**settings.queue.model_dump(), min_residency_s=settings.min_residency_s)
    slots = SlotMaker(
        ledger=ledger,
        shims=Shims(ledger.state.ledger_path, spares=1),
        find_engine=lambda backend: _find_engine(settings, backend),
        grace_s=settings.preempt_grace_s,
        stall_s=settings.stall_s,
        orphan_grace_s=settings.orphan_grace_s if settings.on_restart == "adopt" else None,
    )
    return Pool(
        registry=registry,
        scheduler=Scheduler(limits),
        slots=slots,
        node=socket.gethostname(),
        recorder=Recorder(limits),
        shutdown_s=settings.shutdown_s,
    )


async def _watch(registry: Registry, pool: Pool) -> None:
    """Tell the pool of changed models and manifests."""

    def report(changes: Changes) -> None:
        for problem in changes.problems:
            _log.warning("models_problem", problem=str(problem))
        for where in changes.mended:
            _log.info("models_mended", where=where)
        _log.info("models_changed", added=changes.added, removed=changes.removed, changed=changes.changed)
        pool.models_changed()

    await watch(registry, report)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[None, None, None], name: str) -> AsyncIterator[None]:
    """Have it done as long as the context is open."""

    async def watched() -> None:
        try:
            await work
        except Exception:  # the broker serves on without it; the owner restarts it to have it back
            _log.exception("background_work_ended", work=name)

    task = asyncio.create_task(watched(), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def _largest_room(devices: Iterable[Device]) -> Room | None:
    """The device that leaves one model the most memory; host memory only where there is nothing better."""
    devices = tuple(devices)
    best = [device for device in devices if device.kind is not DeviceKind.CPU] or devices
    rooms = [Room(device.total_bytes - device.reserve_bytes, device.kind.value) for device in best]
    return max(rooms, key=lambda room: room.bytes, default=None)


def _find_engine(settings: Settings, backend: str) -> Path | None:
    return find_llama_server(settings.engines.llama_server) if backend == "llama-server" else None


async def _unrouted(request: Request, error: Exception) -> Response:
    """FastAPI found no endpoint: say so in the shape of every other error."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        raise MethodRefused(f"{request.url.path} takes {allow}, not {request.method}", allow=allow)
    if error.status_code == 400:
        raise BadJson("the request body cannot be read as JSON")
    raise PathUnknown(f"{request.url.path} is not an endpoint of Model Boss; GET /docs lists them")


async def _invalid(request: Request, error: Exception) -> Response:
    """A parameter or a field of the body is wrong: name it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        raise BadJson(f"the request body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    where, words = first["loc"], str(first["msg"]).removeprefix("Value error, ")
    if where == ("body",):
        raise BadRequest(words)
    if where[0] == "body":
        model = request.scope["route"].body_field.field_info.annotation
        raise BadRequest(explained(model, first | {"loc": where[1:]}), param=str(where[1]))
    raise BadRequest(f"{where[-1]}: {words}", param=str(where[-1]))
