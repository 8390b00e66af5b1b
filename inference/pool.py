"""The shell around the scheduler: performs its actions on slots and feeds back what happened.

Called by `coordinator` (submit a ticket, load, unload, look); calls `scheduler.py` (decides), `slot.py` (does) and
`gpuboss` (memory). The scheduler is touched by `_feed` alone, always on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import structlog

from gpuboss.errors import GpubossError
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import LeaseState, Snapshot
from inference import actions, events, readings
from inference.admission import Admission, Grant, Progress
from inference.backends import REGISTRY
from inference.engine_run import GRACE_S
from inference.errors import EngineMissing
from inference.events import Purpose, Ticket
from inference.model import Model
from inference.process import Shims
from inference.registry import Registry
from inference.scheduler import Scheduler
from inference.slot import Ledger, Slot
from inference.slot_state import HAS_LIFE, SlotState

TICK_S = 1.0
"""Between looks at clock and devices while nobody waits."""
WAITING_TICK_S = 0.1
"""The same while a ticket waits: memory that others give back is seen soon."""
NOTICE_S = 2.0
"""How long a slot may take to notice that its engine is dead; usually milliseconds."""
SHUTDOWN_S = 10.0
"""How long requests in flight may go on once the broker is told to end."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One waiting ticket, for people."""

    ticket: Ticket
    position: int
    waited_s: float


class Pool:
    """All slots of this node behind one queue."""

    def __init__(
        self,
        *,
        registry: Registry,
        scheduler: Scheduler,
        ledger: Ledger,
        find_engine: Callable[[str], Path | None],
        node: str,
        shims: Shims | None = None,
        preempt_grace_s: float = GRACE_S,
        shutdown_s: float = SHUTDOWN_S,
    ) -> None:
        self.registry = registry
        self._scheduler = scheduler
        self._ledger = ledger
        self._find_engine = find_engine
        self._node = node
        self._shims = shims or Shims(ledger.state.ledger_path, spares=1)
        self._grace_s = preempt_grace_s
        self._shutdown_s = shutdown_s
        self._models: Mapping[str, Model] = {}
        """Those the scheduler decides about; a reload, in a thread of its own, exchanges the registry's before."""
        self._slots: dict[str, Slot] = {}
        self._admissions: dict[str, Admission] = {}
        self._inbox: deque[events.Event] = deque()
        self._handling = False
        self._ticket_numbers = itertools.count(1)
        self._ticker: asyncio.Task[None] | None = None
        self._someone_waits = asyncio.Event()
        self._nobody_here = asyncio.Event()
        self._self = ProcessIdentity.current()

    # -- life ---------------------------------------------------------------------------------------------------

    async def startup(self) -> None:
        """Tell the scheduler what there is and begin to tick; pinned and preloaded models start loading.

        Raises:
            GpubossError: the memory ledger does not answer.
        """
        await self._shims.startup()
        await self._read_devices()
        self.models_changed()
        self._ticker = asyncio.create_task(self._tick(), name="pool-ticker")

    async def shutdown(self) -> None:
        """Refuse who waits, let who runs finish within the deadline, end every engine, release every lease."""
        self._feed(events.ShutdownBegan(time.monotonic()))
        if self._admissions:
            self._nobody_here.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._shutdown_s):
                    await self._nobody_here.wait()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        await asyncio.gather(*(slot.close() for slot in self._slots.values()))
        await self._shims.close()

    def models_changed(self) -> None:
        """Tell the scheduler that the registry holds other models than before."""
        self._models = dict(self.registry.models)
        self._feed(events.ModelsChanged(time.monotonic(), self._models))

    async def _tick(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._someone_waits.wait()
                    await asyncio.sleep(WAITING_TICK_S)
            try:
                await self._read_devices()
            except GpubossError as error:
                _log.warning("devices_unread", error=str(error))
            except Exception:  # without ticks nobody who waits would ever be told that it was too long
                _log.exception("devices_unread")
            self._feed(events.Tick(time.monotonic()))

    async def _read_devices(self) -> None:
        asked_at_s = time.monotonic()
        snapshot = await self._ledger.snapshot()
        queued = {slot.lease.id: model_id for model_id, slot in self._slots.items() if slot.lease is not None}
        self._feed(
            readings.read(snapshot, owner=self._self, queued=queued, asked_at_s=asked_at_s, at_s=time.monotonic())
        )

    # -- what callers ask ---------------------------------------------------------------------------------------

    def submit(
        self,
        model: Model,
        *,
        priority: int,
        client_id: str | None = None,
        stay_warm_s: float | None = None,
        purpose: Purpose = Purpose.INFER,
    ) -> Admission:
        """Queue a request for `model`; the admission may be settled already. Its `close` must be called."""
        now = time.monotonic()
        ticket = Ticket(
            id=f"t{next(self._ticket_numbers)}",
            model_id=model.id,
            priority=priority,
            submitted_at_s=now,
            client_id=client_id,
            stay_warm_s=stay_warm_s,
            purpose=purpose,
        )
        admission = Admission(ticket, close=self._close, progress=self._progress)
        self._admissions[ticket.id] = admission
        self._feed(events.Arrived(now, ticket))
        if not admission.settled:
            self._someone_waits.set()
        return admission

    async def unload(self, model_id: str) -> None:
        """Take the model out of memory and wait until it is; requests in flight finish, waiting ones are refused."""
        self._feed(events.UnloadWanted(time.monotonic(), model_id))
        slot = self._slots.get(model_id)
        if slot is not None and slot.state in HAS_LIFE:
            await slot.wait_over()

    async def engine_over(self, grant: Grant) -> None:
        """Wait (a moment at most) until a dead engine's slot has noticed: a request submitted anew gets another."""
        slot = self._slots.get(grant.model.id)
        if slot is not None and slot.engine is grant.engine:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_S):
                    await slot.wait_over()

    @property
    def store_up(self) -> bool:
        """False while the ledger's store does not answer; loaded models serve on."""
        return self._ledger.store_up

    def slots(self) -> Mapping[str, Slot]:
        """The slots by model id; of a model that is known no more, only while something of it is left."""
        return {
            model_id: slot
            for model_id, slot in self._slots.items()
            if model_id in self._models or slot.state in HAS_LIFE
        }

    def in_flight(self, model_id: str) -> int:
        """Requests the model's engine works on now."""
        return self._scheduler.in_flight(model_id)

    def waiting(self) -> list[QueueEntry]:
        """Everyone in the queue, next first."""
        now = time.monotonic()
        return [
            QueueEntry(ticket, position, now - ticket.submitted_at_s)
            for position, ticket in enumerate(self._scheduler.waiting(), start=1)
        ]

    async def devices(self) -> Snapshot:
        """The ledger's figures now.

        Raises:
            GpubossError: the store does not answer.
        """
        return await self._ledger.snapshot()

    # -- the loop: event, decision, action -----------------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        """Hand an event to the scheduler and perform what it decides; events raised meanwhile follow in order."""
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                for action in self._scheduler.handle(self._inbox.popleft()):
                    self._perform(action)
        finally:
            self._handling = False

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.Grant(ticket_id, model_id):
                self._grant(ticket_id, self._slots[model_id])
            case actions.Refuse(ticket_id, error):
                if (admission := self._admissions.get(ticket_id)) is not None:
                    admission.refuse(error)
            case actions.Ask(model_id, options, priority):
                if (slot := self._slot_for(model_id)) is not None:
                    slot.ask(options, priority)
            case actions.Start(model_id, options, priority, ahead_of):
                if (slot := self._slot_for(model_id)) is not None:
                    slot.start(options, priority, order=self._place_before(ahead_of))
            case actions.Reprice(model_id, priority):
                if (slot := self._slots.get(model_id)) is not None:
                    slot.reprice(priority)
            case actions.Acknowledge(model_id):
                if (slot := self._slots.get(model_id)) is not None:
                    slot.acknowledge()
            case actions.Drain(model_id, reason):
                self._slots[model_id].drain(reason)
            case actions.Stop(model_id, reason, error):
                self._slots[model_id].stop(reason, error)
            case _:
                assert_never(action)

    def _slot_for(self, model_id: str) -> Slot | None:
        """The slot that is to be started or queued, made anew where there is none for the model as it is now.

        None where no engine is installed for it: that is a load that failed.
        """
        model, slot = self._models[model_id], self._slots.get(model_id)
        if slot is not None and slot.state is SlotState.QUEUED:
            return slot
        try:
            binary = self._engine_for(model)
        except EngineMissing as error:
            self._feed(events.SlotFailed(time.monotonic(), model_id, error, was_ready=False))
            return None
        if slot is None or slot.model != model:
            slot = self._slots[model_id] = Slot(
                model,
                ledger=self._ledger,
                backend=REGISTRY[model.backend],
                binary=binary,
                report=self._hear,
                shims=self._shims,
                grace_s=self._grace_s,
            )
        return slot

    def _place_before(self, models: tuple[str, ...]) -> int | None:
        """A place in the ledger's queue before the leases of these models' slots; None where none of them has one."""
        leases = [slot.lease for model_id in models if (slot := self._slots.get(model_id)) is not None]
        orders = [lease.order for lease in leases if lease is not None and lease.state is LeaseState.QUEUED]
        return min(orders) - 1 if orders else None

    def _hear(self, event: events.Event) -> None:
        """A slot reports; what it must not do any more once a grace is over is looked at in that moment."""
        self._feed(event)
        if isinstance(event, events.Noticed):
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, event.deadline_s - event.at_s), lambda: self._feed(events.Tick(time.monotonic())))

    def _engine_for(self, model: Model) -> Path:
        binary = self._find_engine(model.backend)
        if binary is None:
            raise EngineMissing(
                f"no {model.backend} is installed for model '{model.id}': "
                f"run `model-boss engines install {model.backend}`, or set MODEL_BOSS_LLAMA_SERVER to its path"
            )
        return binary

    def _grant(self, ticket_id: str, slot: Slot) -> None:
        admission = self._admissions[ticket_id]
        queue_s = time.monotonic() - admission.ticket.submitted_at_s
        engine = slot.engine
        assert engine is not None, f"slot {slot.model.id} was granted without an engine"
        loaded_meanwhile = slot.ready_at_s is not None and slot.ready_at_s > admission.ticket.submitted_at_s
        admission.grant(
            Grant(
                model=slot.model,
                slot_id=slot.id,
                node=self._node,
                engine=engine,
                queue_s=queue_s,
                load_s=slot.last_load_s or 0.0 if loaded_meanwhile else 0.0,
            )
        )

    def _close(self, admission: Admission) -> None:
        """Called by the admission, once: the engine is free again, or the queue one shorter."""
        ticket_id = admission.ticket.id
        del self._admissions[ticket_id]
        now = time.monotonic()
        if admission.was_granted:
            self._feed(events.Served(now, ticket_id))
        else:
            self._feed(events.Abandoned(now, ticket_id))
        if not self._scheduler.waiting_count:
            self._someone_waits.clear()
        if not self._admissions:
            self._nobody_here.set()

    def _progress(self, ticket_id: str) -> Progress:
        position, waiting = self._scheduler.position(ticket_id)
        slot = self._slots.get(self._admissions[ticket_id].ticket.model_id)
        return Progress(
            position=position,
            waiting=waiting,
            state=slot.state if slot is not None else SlotState.IDLE,
            load_fraction=slot.load_fraction if slot is not None else None,
        )
