"""A broker's HTTP face on a real socket, with a pool and an engine that do what a test says.

The pool is a fake with the real `Admission`; the engine is a script behind a unix socket, spoken to by the real
`EngineClient`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import uvicorn
from uvicorn.server import ServerState

from coordinator.app import assemble
from coordinator.broker import Broker, Parts
from coordinator.lease_desk import LeaseDesk
from coordinator.listen import listen, url_of
from coordinator.security import Gate
from coordinator.wire import GuardedHttp
from gpuboss.ledger_rows import Ground, SharePeak
from inference import breaker, errors
from inference.admission import Admission, Grant, Progress
from inference.events import Purpose, Ticket
from inference.explain import Explanation
from inference.model import Category, Model
from inference.pool import QueueEntry
from inference.proxy import EngineClient
from inference.slot_state import SlotState
from inference.slot_view import SlotView


def a_model(model_id: str, **changes: Any) -> Model:
    values: dict[str, Any] = {
        "category": Category.LLM,
        "backend": "llama-server",
        "path": Path(f"/models/{model_id}.gguf"),
        "claim_bytes": 3 << 20,
        "claim_basis": "file size x 1.1",
        "file_bytes": 2 << 20,
        "context": 512,
    }
    return Model(id=model_id, **(values | changes))


class FakeRegistry:
    def __init__(self, *models: Model, default: str | None = None) -> None:
        self.models: Mapping[str, Model] = {model.id: model for model in models}
        self.outdated: Mapping[str, str] = {}
        self.default = default

    def resolve(self, name: str | None) -> Model:
        name = name or self.default
        if name is None:
            raise errors.ModelNotFound("the request names no model, and no default_model is set")
        for model in self.models.values():
            if name == model.id or name in model.aliases:
                if model.problem:
                    raise errors.ModelBroken(f"model '{name}' cannot be served: {model.problem}")
                return model
        raise errors.ModelNotFound(f"no model named '{name}'")


@dataclass
class FakeSlot:
    model: Model
    state: SlotState = SlotState.READY
    id: str = ""
    pid: int | None = 4711
    shim_pid: int | None = 4710
    lease: Any = None
    load_fraction: float | None = None
    last_load_s: float | None = 0.05
    story: tuple[Any, ...] = ()
    engine: EngineClient | None = None

    def __post_init__(self) -> None:
        self.id = self.id or self.model.id


@dataclass
class FakePool:
    """Grants at once, or holds tickets until `settle`. Remembers every ticket and how often it was closed."""

    registry: FakeRegistry
    engine: EngineClient
    holding: bool = False
    refusal: errors.InferenceError | None = None
    progress: Progress = field(default_factory=lambda: Progress(3, 7, SlotState.IDLE, None))
    tickets: list[Ticket] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    slot_by_id: dict[str, FakeSlot] = field(default_factory=dict)
    store_up: bool = True
    next_engine: EngineClient | None = None
    """Who serves once the present engine is found dead."""
    unloaded: list[str] = field(default_factory=list)
    beneficiary: str | None = None
    noticed_by: str | None = None
    after_failures: breaker.State = field(default_factory=breaker.MayStart)
    explanation: Explanation | None = None
    too_large: dict[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[SharePeak, ...]] = field(default_factory=dict)
    rested_on: dict[str, tuple[Ground, ...]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def never_fits(self, model_id: str) -> str | None:
        return self.too_large.get(model_id)

    def submit(
        self,
        model: Model,
        *,
        priority: int,
        client_id: str | None = None,
        stay_warm_s: float | None = None,
        purpose: Purpose = Purpose.INFER,
        session_id: str | None = None,
        cooldown_s: float | None = None,
    ) -> Admission:
        number = next(self._numbers)
        ticket = Ticket(
            f"t{number}",
            model.id,
            priority,
            time.monotonic(),
            client_id,
            stay_warm_s,
            purpose,
            session_id,
            cooldown_s,
        )
        self.tickets.append(ticket)
        admission = Admission(
            ticket, close=lambda done: self.closed.append(done.ticket.id), progress=lambda _: self.progress
        )
        self.admissions.append(admission)
        if self.refusal is not None:
            admission.refuse(self.refusal)
        elif not self.holding:
            self.settle(admission)
        return admission

    def settle(self, admission: Admission | None = None, *, load_s: float = 0.0) -> None:
        admission = admission or self.admissions[-1]
        model = self.registry.models[admission.ticket.model_id]
        queue_s = time.monotonic() - admission.ticket.submitted_at_s
        admission.grant(Grant(model, "s1", "here", self.engine, queue_s, load_s))

    @property
    def open_tickets(self) -> list[str]:
        return [ticket.id for ticket in self.tickets if ticket.id not in self.closed]

    def slots(self) -> dict[str, FakeSlot]:
        return self.slot_by_id

    def in_flight(self, slot_id: str) -> int:
        model_id = slot_id.partition("#")[0]
        return sum(ticket.model_id == model_id and ticket.id in self.open_tickets for ticket in self.tickets)

    def slot_view(self, slot_id: str) -> SlotView:
        slot = self.slot_by_id[slot_id]
        ready = slot.state is SlotState.READY
        return SlotView(
            slot_id,
            slot.model.id,
            slot.state,
            {},
            self.in_flight(slot_id),
            waiting=sum(entry.ticket.model_id == slot.model.id for entry in self.waiting()),
            priority=10 if ready else None,
            ready_at_s=None,
            last_used_s=None,
            last_load_s=slot.last_load_s,
            warm_until_s=time.monotonic() + 300 if ready and not slot.model.pin else None,
            pinned=slot.model.pin,
            beneficiary=self.beneficiary,
            noticed_by=self.noticed_by,
        )

    def may_start(self, model_id: str) -> breaker.State:
        return self.after_failures

    async def explain(self, model: Model, priority: int, *, client_id: str | None = None) -> Explanation:
        assert self.explanation is not None
        return replace(self.explanation, model_id=model.id, priority=priority)

    def waiting(self) -> list[QueueEntry]:
        waiting = [admission.ticket for admission in self.admissions if not admission.settled]
        return [
            QueueEntry(ticket, ticket.priority, position, 0.5, self.progress.eta_s, False)
            for position, ticket in enumerate(waiting, start=1)
        ]

    async def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        """Of the ledger."""
        return self.seen

    async def grounds(self, lease_id: str) -> tuple[Ground, ...]:
        """Of the ledger."""
        return self.rested_on.get(lease_id, ())

    async def engine_over(self, grant: Grant) -> None:
        self.engine = self.next_engine or self.engine

    async def unload(self, model_id: str) -> None:
        self.unloaded.append(model_id)
        self.slot_by_id.pop(model_id, None)

    def verify(self) -> None:
        """Every admission was closed, and closed once."""
        assert sorted(self.closed) == sorted(ticket.id for ticket in self.tickets)


@dataclass
class Asked:
    """A request as the engine saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def reply(body: object, status: str = "200 OK", content_type: str = "application/json") -> Script:
    """A script that answers with one whole body."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nServer: llama.cpp\r\n"
            f"Access-Control-Allow-Origin: *\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    return script


EVENTS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(*data: bytes) -> Script:
    """A script that streams events and ends well."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS_HEAD)
        for one in data:
            writer.write(chunk(b"data: " + one + b"\n\n"))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return script


class FakeEngine:
    """HTTP/1.1 on a unix socket; `script` answers each request, and may hang or close the connection."""

    def __init__(self) -> None:
        self.script: Script = reply({"object": "chat.completion", "choices": []})
        self.asked: list[Asked] = []
        self.hung_up = 0
        """Connections the broker closed while an answer was under way."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._one(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        lines = (line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        headers = {name.lower(): value for name, value in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(method, path, headers, body)
        self.asked.append(asked)
        answering = asyncio.ensure_future(self.script(asked, writer))
        watching = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.hung_up += 1
            answering.cancel()
            raise ConnectionError
        if not watching.done():
            # Nothing was pipelined; the next request's first byte must not be lost to this watcher.
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        answering.result()
        await writer.drain()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class Serving:
    """What a test gets."""

    url: str
    pool: FakePool
    engine: FakeEngine
    broker: Broker
    http: aiohttp.ClientSession
    lines: list[str] = field(default_factory=list)

    async def chat(self, **body: Any) -> aiohttp.ClientResponse:
        return await self.http.post(f"{self.url}/v1/chat/completions", json={"model": "robin", "messages": []} | body)


@asynccontextmanager
async def serving(
    tmp_dir: Path,
    *,
    models: tuple[Model, ...] = (),
    default: str | None = None,
    api_key: str | None = None,
    desk: LeaseDesk | None = None,
) -> AsyncIterator[Serving]:
    """The application on a free port; at the end every ticket must have been closed once."""
    engine = FakeEngine()
    path = tmp_dir / "e.sock"
    unix = await asyncio.start_unix_server(engine.connected, path)
    client = EngineClient(path, "engine-key", name="robin")
    registry = FakeRegistry(*(models or (a_model("robin", aliases=("gpt-4",)), a_model("wren"))), default=default)
    first = next(iter(registry.models.values()))
    pool = FakePool(registry, client, slot_by_id={first.id: FakeSlot(first, engine=client)})

    @asynccontextmanager
    async def open_pool() -> AsyncIterator[Any]:
        yield Parts(pool, desk, SimpleNamespace(views=list), pool)  # type: ignore[arg-type] # they play them

    broker = Broker(open_pool, log_dir=tmp_dir)
    listener = listen("127.0.0.1", 0)
    gate = Gate(api_key=api_key, host="127.0.0.1", port=listener.getsockname()[1], allowed_hosts=["box.example"])
    app = assemble(broker, gate, access_log=True)
    config = uvicorn.Config(
        app, http=GuardedHttp, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
    )
    config.load()
    state = ServerState()
    async with app.router.lifespan_context(app), aiohttp.ClientSession() as http:
        server = await asyncio.get_running_loop().create_server(
            lambda: GuardedHttp(config=config, server_state=state, app_state={}), sock=listener
        )
        try:
            yield Serving(url_of(listener), pool, engine, broker, http)
            await _all_ended(state)
        finally:
            server.close()
            for connection in list(state.connections):
                connection.shutdown()
            await client.close()
            unix.close()
            await engine.close()
    pool.verify()


async def _all_ended(state: ServerState) -> None:
    """Requests end by themselves; what a test left running would hide a leak."""
    deadline = time.monotonic() + 5
    while state.tasks:
        assert time.monotonic() < deadline, f"requests still run: {state.tasks}"
        await asyncio.sleep(0.005)
