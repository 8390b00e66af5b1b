"""A slot in a world that the test directs: a ledger in memory, shims that report what they are told to, an engine that
becomes ready when it is allowed to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from gpuboss.devices import Device, DeviceKind
from gpuboss.errors import GpubossError, StaleFence
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, Lease, LeaseRequest, LeaseState, Notice, Shares, Snapshot
from gpuboss.node_ledger import LedgerRow, NodeLedger
from gpuboss.state_dir import StateDir
from inference.backends import Command, Launch, Readiness, Routes
from inference.errors import InferenceError
from inference.events import Event
from inference.fault import Fault
from inference.model import Category, Model
from inference.process import EndReason, Exited, LaunchOrder, Lost, Refused, Report, Started, Wedged
from inference.proxy import EngineClient
from inference.slot import Slot

MODEL = Model(
    id="robin",
    category=Category.LLM,
    backend="fake",
    path=Path("/models/robin.gguf"),
    claim_bytes=1 << 20,
    claim_basis="a test",
    file_bytes=1 << 20,
    context=512,
)
OPTIONS = ({"sim0": 1 << 20},)
ENGINE_PID = 4_000_000
"""Larger than any pid there is."""


class MemoryLedger:
    """Grants at once while `free` is set; notes what is given back."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.state = StateDir(root)
        self.devices: tuple[Device, ...] = (Device("sim0", DeviceKind.SIM, "sim0", 0, 1 << 30, 0, measured=False),)
        self.free = asyncio.Event()
        self.free.set()
        self.refuses: GpubossError | None = None
        self.fails_to_release: GpubossError | None = None
        self.requests: list[LeaseRequest] = []
        self.orders: list[int | None] = []
        self.given_back: list[tuple[str, str]] = []
        self.changes: list[tuple[LeaseState, Sequence[Shares] | None, int | None]] = []
        """State, options and class of every lease that was to be changed."""
        self.fails_to_change: GpubossError | None = None
        self.acknowledged: list[str] = []
        self.callbacks: dict[str, Callable[[Lease], None]] = {}
        """Who is told of notices, by lease."""
        self.sweeps = 0
        self.buries = True
        """Whether its keeper can write the books."""
        self.answers = asyncio.Event()
        """Whether its keeper answers who asks for a sweep."""
        self.answers.set()

    async def acquire(self, request: LeaseRequest, *, order: int | None = None) -> Lease:
        self.requests.append(request)
        self.orders.append(order)
        await asyncio.sleep(0)
        if self.refuses is not None:
            raise self.refuses
        return self._lease(request, LeaseState.GRANTED if self.free.is_set() else LeaseState.QUEUED)

    async def wait_granted(self, lease: Lease) -> Lease:
        await self.free.wait()
        return self._lease(next(r for r in self.requests if r.request_id == lease.request_id), LeaseState.GRANTED)

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None, priority: int | None = None) -> Lease:
        await asyncio.sleep(0)
        if self.fails_to_change is not None:
            raise self.fails_to_change
        if lease.state is LeaseState.QUEUED and self.free.is_set():
            raise StaleFence("it was granted a moment ago")
        self.changes.append((lease.state, options, priority))
        return replace(lease, priority=lease.priority if priority is None else priority)

    def on_notice(self, lease: Lease, callback: Callable[[Lease], None]) -> None:
        self.callbacks[lease.id] = callback

    def notice(self, notice: Notice | None) -> None:
        """Tell the holder of the lease that was asked for last."""
        request = self.requests[-1]
        lease = replace(self._lease(request, LeaseState.GRANTED), notice=notice)
        self.callbacks[request.request_id](lease)

    async def ack(self, lease: Lease) -> Lease:
        self.acknowledged.append(lease.id)
        return lease

    async def cancel(self, lease: Lease) -> None:
        self.callbacks.pop(lease.id, None)
        self.given_back.append(("cancel", lease.id))

    async def release(self, lease: Lease) -> None:
        self.callbacks.pop(lease.id, None)
        self.given_back.append(("release", lease.id))
        if self.fails_to_release is not None:
            raise self.fails_to_release

    async def sweep(self) -> None:
        """As the keeper does: what a dead shim left is dead, so its row goes."""
        self.sweeps += 1
        await self.answers.wait()
        if not self.buries:
            return
        with NodeLedger(self.state.ledger_path) as books:
            for row in books.rows():
                books.remove(row.lease_id, row.epoch, row.seq)

    async def snapshot(self) -> Snapshot:
        return Snapshot(1, (), ())

    def enter(self, lease_id: str) -> None:
        """Put a row into the books, as a shim does that dies before it can take it out."""
        own = ProcessIdentity.current()
        with NodeLedger(self.state.ledger_path) as books:
            books.put_devices(self.devices)
            books.admit(
                LedgerRow(lease_id, 1, 1, "slot:robin", {"sim0": 1}, own.pid, own.start_ticks, own.pid_namespace)
            )

    def rows(self) -> list[LedgerRow]:
        with NodeLedger(self.state.ledger_path) as books:
            return books.rows()

    @staticmethod
    def _lease(request: LeaseRequest, state: LeaseState) -> Lease:
        granted = state is LeaseState.GRANTED
        return Lease(
            id=request.request_id,
            request_id=request.request_id,
            holder=request.holder,
            kind=request.kind,
            state=state,
            shares=request.options[0] if granted else {},
            priority=request.priority,
            fence=Fence(1, 1) if granted else None,
            position=None if granted else 1,
            owner=ProcessIdentity.current(),
            since_ms=0,
        )


class FakeShim:
    """Starts an engine unless told otherwise, and ends it when ordered."""

    def __init__(self, world: World) -> None:
        self.orders: list[object] = []
        self.closed = False
        self.obeys = True
        """False: an order to stop is not answered."""
        self._world = world
        self._reports: asyncio.Queue[Report] = asyncio.Queue()

    def launch(self, order: LaunchOrder) -> None:
        self.orders.append(order)
        self.say(self._world.answers.pop(0) if self._world.answers else Started(ENGINE_PID))

    def stop(self, grace_s: float) -> None:
        self.orders.append(grace_s)
        if self.obeys:
            self.say(Exited(None, 9, 1, EndReason.STOPPED))

    def say(self, report: Report) -> None:
        """Report something."""
        self._reports.put_nowait(report)

    async def report(self) -> Report:
        return await self._reports.get()


class FakeShims:
    """Gives out `FakeShim`s."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.out: list[FakeShim] = []

    async def take(self) -> FakeShim:
        self.out.append(FakeShim(self._world))
        return self.out[-1]

    def retire(self, shim: FakeShim) -> None:
        shim.closed = True

    def refill(self) -> None:
        """Nothing is spared here."""


class FakeBackend:
    """An engine that is ready when `ready` is set."""

    name = "fake"
    categories = frozenset({Category.LLM})
    options = BaseModel
    stop_grace_s = 0.5

    def __init__(self) -> None:
        self.routes: Routes = {}
        self.ready = asyncio.Event()
        self.ready.set()
        self.fraction: float | None = None
        self.probes = 0
        self.raises: InferenceError | None = None
        self.launches: list[Launch] = []
        self.says: Callable[[], Hashable | None] = lambda: None
        """What it answers when it is asked how far it is."""
        self.asked = 0
        self.fault = Fault.CRASH
        self.read_lines: Sequence[str] = ()
        """What it had to diagnose last."""

    def check_args(self, extra_args: Sequence[str]) -> None:
        """Anything goes."""

    def command(self, model: Model, launch: Launch) -> Command:
        self.launches.append(launch)
        return Command(("/bin/engine", model.id), {"A": "b"})

    async def probe(self, engine: EngineClient) -> Readiness:
        self.probes += 1
        if self.raises is not None:
            raise self.raises
        return Readiness(ready=self.ready.is_set(), fraction=self.fraction)

    async def progress(self, engine: EngineClient) -> Hashable | None:
        self.asked += 1
        return self.says()

    def diagnose(self, ended: Exited, last_lines: Sequence[str]) -> Fault:
        self.read_lines = last_lines
        return self.fault


@dataclass
class World:
    """One slot and everything around it."""

    root: Path
    now_s: float = 100.0
    events: list[Event] = field(default_factory=list)
    answers: list[Report] = field(default_factory=list)
    """What shims say to the next launches; `Started` when there is nothing."""

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(self.root / "state")
        self.backend = FakeBackend()
        self.shims = FakeShims(self)
        self.slot = Slot(
            MODEL,
            ledger=self.ledger,
            backend=self.backend,
            binary=Path("/bin/engine"),
            report=self.events.append,
            shims=self.shims,  # type: ignore[arg-type] # plays it
            clock=lambda: self.now_s,
        )

    @property
    def shim(self) -> FakeShim:
        """The one that was given out last."""
        return self.shims.out[-1]

    def told(self, kind: type[Event]) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


__all__ = ["ENGINE_PID", "MODEL", "OPTIONS", "Exited", "Lost", "Refused", "Started", "Wedged", "World"]
