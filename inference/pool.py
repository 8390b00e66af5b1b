"""The shell around the scheduler: performs its actions on slots and feeds back what happened.

Called by `coordinator` (submit a ticket, load, unload, look, explain); calls `scheduler.py` (decides), `slot.py`
(does), `adoption.py` (what an earlier broker left), `forecaster.py` (whose turn when) and `gpuboss` (memory). The
scheduler is touched by `_feed` alone, always on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import structlog

from gpuboss.errors import GpubossError
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import LeaseState, Snapshot
from inference import actions, breaker, events, readings, refusals
from inference.admission import Admission, Grant, Progress
from inference.adoption import adopt_orphans
from inference.errors import EngineMissing, InferenceError, QueueTimeout
from inference.events import Purpose, Ticket
from inference.explain import TICKET, Explanation, explain
from inference.forecast import Forecast
from inference.forecaster import Forecaster, look_ahead
from inference.learned import Serving
from inference.model import Model
from inference.orphans import Past
from inference.registry import Registry
from inference.scheduler import Scheduler
from inference.simulation.recorder import Recorder
from inference.slot import Slot
from inference.slot_maker import SlotMaker
from inference.slot_state import HAS_LIFE, SlotState
from inference.slot_view import SlotView

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
    priority: int
    """The class it has risen to."""
    position: int
    waited_s: float
    eta_s: float | None
    """Until its turn, as far as anybody can tell."""
    keeps_place: bool
    """It stands where its client stood before."""


class Pool:
    """All slots of this node behind one queue."""

    def __init__(
        self,
        *,
        registry: Registry,
        scheduler: Scheduler,
        slots: SlotMaker,
        node: str,
        recorder: Recorder | None = None,
        shutdown_s: float = SHUTDOWN_S,
    ) -> None:
        """`slots` decides with its `orphan_grace_s` whether engines outlive their broker."""
        self.registry = registry
        self.recorder = recorder or Recorder()
        """Takes down who asks for what, for those who listen."""
        self._scheduler = scheduler
        self._maker = slots
        self._ledger = slots.ledger
        self._node = node
        self._shutdown_s = shutdown_s
        self._forecaster = Forecaster(scheduler)
        self._models: Mapping[str, Model] = {}
        """Those the scheduler decides about; a reload, in a thread of its own, exchanges the registry's before."""
        self._too_large: dict[str, str] = {}
        """Models that can never be loaded, and why, as the log has it."""
        self._slots: dict[str, Slot] = {}
        self._admissions: dict[str, Admission] = {}
        self._granted_at_s: dict[str, float] = {}
        self._inbox: deque[events.Event] = deque()
        self._handling = False
        self._ticket_numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._someone_waits = asyncio.Event()
        self._nobody_here = asyncio.Event()
        self._self = ProcessIdentity.current()

    # -- life ---------------------------------------------------------------------------------------------------

    async def startup(self) -> None:
        """Tell the scheduler what there is, take over what an earlier broker left, and begin to tick.

        Pinned and preloaded models start loading then.

        Raises:
            GpubossError: the memory ledger does not answer.
        """
        await self._maker.shims.startup()
        self._models = dict(self.registry.models)
        await self._read_devices()
        self._feed(events.ModelsChanged(time.monotonic(), self._models))
        self._warn_of_the_too_large()
        await adopt_orphans(self._ledger, self._heir_of)
        await self._read_devices()
        self._feed(events.Tick(time.monotonic()))
        self._tasks = [
            asyncio.create_task(self._tick(), name="pool-ticker"),
            asyncio.create_task(self._forecaster.main_loop(self._someone_waits), name="pool-forecaster"),
        ]

    async def shutdown(self) -> None:
        """Refuse who waits, let who runs finish within the deadline, end every engine, release every lease."""
        self._feed(events.ShutdownBegan(time.monotonic()))
        if self._admissions:
            self._nobody_here.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._shutdown_s):
                    await self._nobody_here.wait()
        self._feed(events.ShutdownDue(time.monotonic(), self._shutdown_s))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(slot.close() for slot in self._slots.values()))
        await self._maker.shims.close()

    def models_changed(self) -> None:
        """Tell the scheduler that the registry holds other models than before."""
        self._models = dict(self.registry.models)
        self._feed(events.ModelsChanged(time.monotonic(), self._models))
        self._warn_of_the_too_large()
        self._feed(events.Tick(time.monotonic()))

    def _warn_of_the_too_large(self) -> None:
        """Log whose requests will all be refused, once for each reason."""
        told, self._too_large = self._too_large, {}
        for model_id in self._models:
            if (reason := self.never_fits(model_id)) is not None:
                self._too_large[model_id] = reason
                if told.get(model_id) != reason:
                    _log.warning("model_never_fits", model=model_id, reason=reason)

    def _heir_of(self, past: Past) -> Slot | None:
        """The slot for an engine that an earlier broker left; None where it is not to be adopted."""
        model = self._models.get(past.model_id)
        if self._maker.orphan_grace_s is None or model is None or model.problem is not None:
            return None
        if past.slot_id not in self._slots:
            if sum(slot.model.id == model.id for slot in self._slots.values()) >= model.replicas:
                return None
            try:
                self._slots[past.slot_id] = self._maker.make(model, past.slot_id, self._hear)
            except EngineMissing:
                return None
        return self._slots[past.slot_id]

    async def _tick(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._someone_waits.wait()
                    await asyncio.sleep(WAITING_TICK_S)
            # Whatever goes wrong in one: without ticks nobody who waits would ever be told that it was too long.
            try:
                await self._read_devices()
            except GpubossError as error:
                _log.warning("devices_unread", error=str(error))
            except Exception:
                _log.exception("devices_unread")
            try:
                self._feed(events.Tick(time.monotonic()))
            except Exception:
                _log.exception("tick_failed")

    async def _read_devices(self) -> None:
        asked_at_s = time.monotonic()
        snapshot = await self._ledger.snapshot()
        queued = {slot.lease.id: slot_id for slot_id, slot in self._slots.items() if slot.lease is not None}
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
        session_id: str | None = None,
        cooldown_s: float | None = None,
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
            session_id=session_id,
            cooldown_s=cooldown_s,
        )
        admission = Admission(ticket, close=self._close, progress=self._progress)
        self._admissions[ticket.id] = admission
        self.recorder.arrived(ticket, now)
        self._feed(events.Arrived(now, ticket))
        if not admission.settled:
            self._someone_waits.set()
        return admission

    async def unload(self, model_id: str) -> None:
        """Take the model out of memory and wait until it is; requests in flight finish, waiting ones are refused."""
        self._feed(events.UnloadWanted(time.monotonic(), model_id))
        for slot in [slot for slot in self._slots.values() if slot.model.id == model_id and slot.state in HAS_LIFE]:
            await slot.wait_over()

    async def engine_over(self, grant: Grant) -> None:
        """Wait (a moment at most) until a dead engine's slot has noticed: a request submitted anew gets another."""
        slot = self._slots.get(grant.slot_id)
        if slot is not None and slot.engine is grant.engine:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_S):
                    await slot.wait_over()

    @property
    def store_up(self) -> bool:
        """False while the ledger's store does not answer; loaded models serve on."""
        return self._ledger.store_up

    def slots(self) -> Mapping[str, Slot]:
        """The slots by id; of a model that is known no more, only while something of it is left."""
        return {
            slot_id: slot
            for slot_id, slot in self._slots.items()
            if slot.model.id in self._models or slot.state in HAS_LIFE
        }

    def in_flight(self, slot_id: str) -> int:
        """Requests the slot's engine works on now."""
        return self._scheduler.in_flight(slot_id)

    def serving(self) -> list[Serving]:
        """The slots that are ready, for those who learn what models take."""
        return [
            Serving(slot.model, slot.lease, slot.ready_at_s)
            for slot in self._slots.values()
            if slot.lease is not None and slot.ready_at_s is not None
        ]

    def slot_view(self, slot_id: str) -> SlotView:
        """The slot as the scheduler sees it: its class, how long it stays, whom it leaves for."""
        return self._scheduler.slot_view(slot_id)

    def may_start(self, model_id: str) -> breaker.State:
        """Whether the model's engine may be started now, after its failures."""
        return self._scheduler.board.breaker_state(model_id)

    def waiting(self) -> list[QueueEntry]:
        """Everyone in the queue, next first."""
        now_s = time.monotonic()
        return [
            QueueEntry(
                ticket=entry.ticket,
                priority=entry.priority,
                position=position,
                waited_s=now_s - entry.ticket.submitted_at_s,
                eta_s=self._forecaster.eta_s(entry.ticket.id),
                keeps_place=entry.submitted_at_s < entry.ticket.submitted_at_s,
            )
            for position, entry in enumerate(self._scheduler.board.line.in_order(now_s), start=1)
        ]

    def never_fits(self, model_id: str) -> str | None:
        """Why the model can never be loaded on these devices; None where it can, if all else is gone."""
        board = self._scheduler.board
        if model_id not in board.models or not board.usable:
            return None
        told = board.models[model_id]
        refusal = refusals.never_fits(board, told, board.claim_of(model_id), board.host_bytes_of(model_id))
        return refusal.message if refusal is not None else None

    async def explain(self, model: Model, priority: int, *, client_id: str | None = None) -> Explanation:
        """What would become of a request for the model now, why it would wait, and who would go for it.

        Raises:
            TooManyQuestions: many wait for the same; each takes the processor for a while.
        """
        async with self._forecaster.question():
            now_s = time.monotonic()
            told, twin = explain(self._scheduler, model.id, priority, now_s, client_id=client_id)
            forecast = Forecast(twin, now_s)
            await look_ahead(forecast, resting=True)
        if told.waits_for_others:
            with contextlib.suppress(GpubossError):  # without the store their sum has to do
                others = readings.of_others(await self._ledger.snapshot(), self._self)
                told = told.naming(readings.holders(others, priority))
        turn_s = forecast.turns_s.get(TICKET)
        return told if turn_s is None else told.with_eta(turn_s - now_s)

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
            case actions.Grant(ticket_id, slot_id):
                self._grant(ticket_id, self._slots[slot_id])
            case actions.Refuse(ticket_id, error):
                self._refuse(ticket_id, error)
            case actions.Ask(slot_id, model_id, options, priority):
                if (slot := self._slot_for(slot_id, model_id)) is not None:
                    slot.ask(options, priority)
            case actions.Start(slot_id, model_id, options, priority, ahead_of):
                if (slot := self._slot_for(slot_id, model_id)) is not None:
                    slot.start(options, priority, order=self._place_before(ahead_of))
            case actions.Reprice(slot_id, priority):
                if (slot := self._slots.get(slot_id)) is not None:
                    slot.reprice(priority)
            case actions.Acknowledge(slot_id):
                if (slot := self._slots.get(slot_id)) is not None:
                    slot.acknowledge()
            case actions.Drain(slot_id, reason):
                self._slots[slot_id].drain(reason)
            case actions.Stop(slot_id, reason, error):
                self._slots[slot_id].stop(reason, error)
            case _:
                assert_never(action)

    def _slot_for(self, slot_id: str, model_id: str) -> Slot | None:
        """The slot that is to be started or queued, made anew where there is none for the model as it is now.

        None where no engine is installed for it: that is a load that failed.
        """
        model, slot = self._models[model_id], self._slots.get(slot_id)
        if slot is not None and slot.state is SlotState.QUEUED:
            return slot
        if slot is None or slot.model != model:
            try:
                slot = self._maker.make(model, slot_id, self._hear, slot.story if slot is not None else ())
            except EngineMissing as error:
                self._feed(events.SlotFailed(time.monotonic(), slot_id, error, was_ready=False))
                return None
            self._slots[slot_id] = slot
        return slot

    def _place_before(self, slot_ids: tuple[str, ...]) -> int | None:
        """A place in the ledger's queue before the leases of these slots; None where none of them has one."""
        leases = [slot.lease for slot_id in slot_ids if (slot := self._slots.get(slot_id)) is not None]
        orders = [lease.order for lease in leases if lease is not None and lease.state is LeaseState.QUEUED]
        return min(orders) - 1 if orders else None

    def _hear(self, event: events.Event) -> None:
        """A slot reports; what it must not do any more once a grace is over is looked at in that moment."""
        self._feed(event)
        if isinstance(event, events.Noticed):
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, event.deadline_s - event.at_s), lambda: self._feed(events.Tick(time.monotonic())))

    def _grant(self, ticket_id: str, slot: Slot) -> None:
        admission = self._admissions[ticket_id]
        now_s = self._granted_at_s[ticket_id] = time.monotonic()
        queue_s = now_s - admission.ticket.submitted_at_s
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

    def _refuse(self, ticket_id: str, error: InferenceError) -> None:
        admission = self._admissions.get(ticket_id)
        if admission is None:
            return
        eta_s = self._forecaster.eta_s(ticket_id)
        if isinstance(error, QueueTimeout) and eta_s is not None:
            error.retry_after_s = eta_s
            error.facts = {**error.facts, "eta_s": round(eta_s, 1)}
        self.recorder.refused(ticket_id)
        admission.refuse(error)

    def _close(self, admission: Admission) -> None:
        """Called by the admission, once: the engine is free again, or the queue one shorter."""
        ticket_id = admission.ticket.id
        del self._admissions[ticket_id]
        now_s = time.monotonic()
        if admission.was_granted:
            self.recorder.served(ticket_id, now_s - self._granted_at_s.pop(ticket_id), now_s)
            self._feed(events.Served(now_s, ticket_id))
        else:
            self.recorder.left(ticket_id, now_s)
            self._feed(events.Abandoned(now_s, ticket_id))
        if not self._scheduler.waiting_count:
            self._someone_waits.clear()
        if not self._admissions:
            self._nobody_here.set()

    def _progress(self, ticket_id: str) -> Progress:
        position, waiting = self._scheduler.position(ticket_id)
        model_id = self._admissions[ticket_id].ticket.model_id
        slots = [slot for slot in self._slots.values() if slot.model.id == model_id]
        slot = next((slot for slot in slots if slot.state is SlotState.LOADING), slots[0] if slots else None)
        return Progress(
            position=position,
            waiting=waiting,
            state=slot.state if slot is not None else SlotState.IDLE,
            load_fraction=slot.load_fraction if slot is not None else None,
            eta_s=self._forecaster.eta_s(ticket_id),
        )
