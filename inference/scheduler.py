"""Decides which model runs where and whose turn it is: events in, actions out.

Called by `pool.py`, the one shell around it. Pure and total: no clock (every event tells the time), no I/O, and any
event is accepted in any state; one about something unknown or long past changes nothing. `handle` notes the fact on
`board.py`; then `plan.py` decides over the whole state.

What slots report is trusted like this: every start ends in one SlotFailed or SlotGone. A SlotGone about a slot that is
loading is one of an earlier life that came late, and is ignored.
"""

from __future__ import annotations

import math
from typing import assert_never

from gpuboss.priority import LEAST_IMPORTANT, PINNED
from inference import events, refusals, returning, yielding
from inference.actions import Action
from inference.board import Board
from inference.breaker import Breaker
from inference.events import Purpose, Ticket
from inference.fault import Fault
from inference.model import Model
from inference.plan import Plan
from inference.queue import QueueLimits
from inference.slot_state import HAS_LIFE, HOLDS_MEMORY, LEAVING, SlotState
from inference.slot_view import SlotRecord, SlotView


class Scheduler:
    """The policy of one pool. `handle` writes; everything else looks."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._board = Board(limits or QueueLimits())
        self._kept_loaded: tuple[Model, ...] = ()
        """Models to load without a request: pinned ones, then preloaded ones."""

    def handle(self, event: events.Event) -> list[Action]:
        """Take note of the event and return what is to be done now, in the order to do it."""
        board = self._board
        board.now_s = max(board.now_s, event.at_s)
        if board.resting:
            board.wake_the_rested()
        self._note(event)
        if board.shutting_down:
            return board.take_actions()
        plan = Plan(board)
        plan.run()
        while plan.again:
            plan = Plan(board)
            plan.run()
        if isinstance(event, events.Tick):
            returning.bring_back(board, self._kept_loaded, plan.contested)
            for slot in board.slots.holders():
                self._fit_lease(slot)
        return board.take_actions()

    # -- facts --------------------------------------------------------------------------------------------------

    def _note(self, event: events.Event) -> None:
        match event:
            case events.Arrived():
                self._arrived(event.ticket)
            case events.Served():
                self._served(event.ticket_id)
            case events.Abandoned():
                self._board.keep_place(event.ticket_id)
                self._board.withdraw(event.ticket_id)
            case events.Tick():
                self._tick()
            case (
                events.LeaseGranted()
                | events.LeaseLost()
                | events.SlotReady()
                | events.SlotFailed()
                | events.SlotWedged()
                | events.SlotGone()
            ):
                slot = self._board.slots.get(event.slot_id)
                if slot is not None:
                    self._slot_reported(slot, event)
            case events.SlotAdopted():
                self._adopted(event)
            case events.Noticed() | events.Withdrawn():
                slot = self._board.slots.get(event.slot_id)
                if slot is not None:
                    self._noticed(slot, event)
            case events.UnloadWanted():
                self._unload(event.model_id)
            case events.DevicesRead():
                self._board.read_devices(event)
            case events.ModelsChanged():
                self._models_changed(event)
            case events.ShutdownBegan():
                self._shut_down()
            case events.ShutdownDue():
                self._cut_short(event)
            case _:
                assert_never(event)

    def _arrived(self, ticket: Ticket) -> None:
        board = self._board
        if ticket.id in board.line or ticket.id in board.running:
            return
        if board.shutting_down:
            board.turn_away(ticket, refusals.shutting_down())
            return
        if len(board.line) >= board.limits.max_waiting and not self._free_place(ticket):
            board.turn_away(ticket, refusals.queue_full(board))
            return
        board.line_up(ticket)
        board.habits.arrived(ticket.model_id, ticket.priority, board.now_s)
        for slot in board.slots.of(ticket.model_id):
            slot.stays_out, slot.unwanted_since_s = False, None
        if ticket.purpose is Purpose.LOAD and (breaker := board.breakers.get(ticket.model_id)) is not None:
            breaker.pardon()  # somebody wants to know whether it works now

    def _free_place(self, ticket: Ticket) -> bool:
        """Would the ticket be granted without waiting?"""
        board, slots = self._board, self._board.slots.of(ticket.model_id)
        if ticket.client_id in board.resting:
            return False
        if ticket.purpose is Purpose.LOAD:
            return any(slot.state is SlotState.READY for slot in slots)
        return not board.line.wants(ticket.model_id) and any(slot.has_place for slot in slots)

    def _served(self, ticket_id: str) -> None:
        board = self._board
        slot = board.running.pop(ticket_id, None)
        if slot is None:
            return
        entry = slot.in_flight.pop(ticket_id)
        board.habits.served(slot.model.id, board.now_s - slot.granted_at_s.pop(ticket_id))
        self._cool_down(entry.ticket)
        if (breaker := board.breakers.get(slot.model.id)) is not None:
            breaker.served(board.now_s)
        if entry.ticket.purpose is not Purpose.PEEK:
            slot.priority = entry.ticket.priority  # its own class: having waited long does not defend an idle slot
            slot.idle_since_s = slot.last_used_s = board.now_s
            slot.stay_warm(board.now_s, entry.ticket.stay_warm_s)
        if slot.state is SlotState.DRAINING and not slot.in_flight:
            board.stop(slot, "drained")

    def _cool_down(self, ticket: Ticket) -> None:
        cooldown_s = ticket.cooldown_s if ticket.cooldown_s is not None else self._board.limits.client_cooldown_s
        if ticket.client_id is not None and cooldown_s > 0:
            self._board.rest(ticket.client_id, cooldown_s)

    def _slot_reported(
        self,
        slot: SlotRecord,
        event: events.LeaseGranted
        | events.LeaseLost
        | events.SlotReady
        | events.SlotFailed
        | events.SlotWedged
        | events.SlotGone,
    ) -> None:
        board, state = self._board, slot.state
        match event:
            case events.LeaseGranted():
                if state in (SlotState.QUEUED, SlotState.LOADING, SlotState.STOPPING):
                    board.leased(slot, event.shares)
            case events.LeaseLost():
                if state in HOLDS_MEMORY and state is not SlotState.WEDGED:
                    if state not in LEAVING:
                        breaker, was_ready = self._breaker_of(slot.model.id), state is SlotState.READY
                        breaker.failed(Fault.CRASH, board.now_s, "its lease was lost", was_ready=was_ready)
                    board.lost(slot)
            case events.SlotReady():
                if state is SlotState.LOADING:
                    board.habits.loaded(slot.model, event.load_s)
                    board.ready(slot, event.load_s)
            case events.SlotFailed():
                if state in HAS_LIFE:
                    self._failed(slot, event)
            case events.SlotWedged():
                if state in HOLDS_MEMORY - {
                    SlotState.STOPPING,
                    SlotState.WEDGED,
                }:  # it ended by itself, as far as it did
                    words = "its processes survive SIGKILL"
                    self._breaker_of(slot.model.id).failed(Fault.CRASH, board.now_s, words, was_ready=True)
                if state in HOLDS_MEMORY:
                    board.wedged(slot)
            case events.SlotGone():
                if state is SlotState.STOPPING:
                    board.habits.stopped(board.now_s - slot.moved_at_s)
                if state not in (SlotState.QUEUED, SlotState.LOADING):
                    board.gone(slot, SlotState.IDLE)
            case _:
                assert_never(event)

    def _failed(self, slot: SlotRecord, event: events.SlotFailed) -> None:
        """What the engine did wrong decides whether those who wait for it are worth another load: `breaker.py` says.

        Where it was not the engine (no room, no ledger, no program), a load that failed takes them along.
        """
        board, state, model_id = self._board, slot.state, slot.model.id
        was_loading = state in (SlotState.QUEUED, SlotState.LOADING) and not event.was_ready
        board.gone(slot, SlotState.FAILED)
        if state in LEAVING:
            return  # it was to go anyway
        slot.stays_out = slot.stays_out or was_loading
        if event.fault is not None:
            breaker = self._breaker_of(model_id)
            breaker.failed(event.fault, board.now_s, event.error.message, was_ready=event.was_ready)
        elif was_loading:
            for entry in board.line.waiting_for(model_id):
                board.refuse(entry, event.error)

    def _breaker_of(self, model_id: str) -> Breaker:
        breaker = self._board.breakers.get(model_id)
        if breaker is None:
            breaker = self._board.breakers[model_id] = Breaker(model_id)
        return breaker

    def _adopted(self, event: events.SlotAdopted) -> None:
        """An engine that outlived its broker. The pool adopts none whose model it does not know."""
        board = self._board
        slot = board.slots.get(event.slot_id)
        if event.model_id in board.models and (slot is None or slot.state not in HAS_LIFE):
            board.adopt(event)
            board.habits.loaded(board.models[event.model_id], event.load_s)

    def _noticed(self, slot: SlotRecord, event: events.Noticed | events.Withdrawn) -> None:
        """Only a lease that is held gets notice; what becomes of it, `yielding.py` says."""
        if isinstance(event, events.Withdrawn):
            self._board.withdraw_notice(slot)
        elif slot.state in HOLDS_MEMORY and slot.state is not SlotState.WEDGED:
            self._board.notice(slot, event)
            yielding.heed(self._board, slot)

    def _unload(self, model_id: str) -> None:
        board = self._board
        if model_id in board.models:
            board.slots.first_of(board.models[model_id])
        for slot in list(board.slots.of(model_id)):
            slot.stays_out = True
            board.remove(slot, "unloaded by an operator")
        if board.slots.of(model_id):
            for entry in board.line.waiting_for(model_id):
                board.refuse(entry, refusals.unloaded(model_id))

    def _models_changed(self, event: events.ModelsChanged) -> None:
        board = self._board
        board.know_models(event.models)
        kept = [model for model in event.models.values() if (model.pin or model.preload) and model.problem is None]
        self._kept_loaded = tuple(sorted(kept, key=lambda model: not model.pin))
        for slot in list(board.slots.values()):
            slot.stays_out = False
            if slot.model.id not in event.models:
                board.remove(slot, "no longer among the known models")
            elif slot.state is SlotState.QUEUED and slot.model != event.models[slot.model.id]:
                board.remove(slot, "is asked for anew: its model is another now")
            else:
                slot.model = slot.model.ruled_by(event.models[slot.model.id])

    def _shut_down(self) -> None:
        board = self._board
        board.shutting_down = True
        for entry in board.line.in_order(board.now_s):
            board.refuse(entry, refusals.shutting_down())
        for slot in board.slots.values():
            board.remove(slot, "the broker shuts down")

    def _cut_short(self, event: events.ShutdownDue) -> None:
        board = self._board
        for slot in board.slots.values():
            if slot.state is SlotState.DRAINING:
                board.cut_short(slot, "the broker shuts down", refusals.cut_by_shutdown(event.shutdown_s))

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        board = self._board
        for entry in board.line.expired(board.now_s, board.limits.max_wait_s):
            board.keep_place(entry.ticket.id)
            board.refuse(entry, refusals.queue_timeout(board, entry))
        board.places.forget(board.now_s)
        for slot in board.slots.values():
            idle = slot.state is SlotState.READY and not slot.in_flight and not board.line.wants(slot.model.id)
            if idle and self._leaves_when_idle(slot) and board.now_s >= slot.warm_until_s:
                board.drain(slot, "has been idle for as long as it was to stay warm")

    @staticmethod
    def _leaves_when_idle(slot: SlotRecord) -> bool:
        return not slot.model.pin and not slot.model.preload

    def _fit_lease(self, slot: SlotRecord) -> None:
        """A held lease has the class its slot defends itself with, so that the ledger asks the right ones to yield.

        One that loads and that nobody waits for comes last. A pinned one comes first: it yields to nobody.
        """
        board = self._board
        if slot.state in LEAVING or slot.state is SlotState.WEDGED:
            return
        if slot.state is SlotState.LOADING and not board.line.wants(slot.model.id):
            board.reprice_load(slot, LEAST_IMPORTANT)
        elif slot.model.pin and slot.leased:
            board.reprice(slot, PINNED)
        elif slot.leased:
            priority = board.priority_of(slot)
            # A notice was given to the class the lease has; only one that would take the notice back is worth telling.
            if slot.notice is None or priority < board.demands[slot.notice.by].priority:
                board.reprice(slot, priority)

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def board(self) -> Board:
        """The whole state, for those who explain and foretell; only the scheduler writes it."""
        return self._board

    @property
    def waiting_count(self) -> int:
        """Tickets in the queue."""
        return len(self._board.line)

    def waiting(self) -> list[Ticket]:
        """Everyone in the queue, next first, ageing counted."""
        return [entry.ticket for entry in self._board.line.in_order(self._board.now_s)]

    def position(self, ticket_id: str) -> tuple[int, int]:
        """(k, n): the ticket is the k-th of n by class and submission; (0, n) when it does not wait."""
        return self._board.line.position(ticket_id)

    def in_flight(self, slot_id: str) -> int:
        """Tickets that use the slot's engine now."""
        slot = self._board.slots.get(slot_id)
        return len(slot.in_flight) if slot is not None else 0

    def slot_view(self, slot_id: str) -> SlotView:
        """The slot as the scheduler sees it; an IDLE one for a slot that never was."""
        board = self._board
        slot = board.slots.get(slot_id)
        if slot is None:
            waiting = len(board.line.waiting_for(slot_id))
            return SlotView(slot_id, slot_id, SlotState.IDLE, waiting=waiting)
        waiting = len(board.line.waiting_for(slot.model.id))
        ready = slot.state is SlotState.READY
        leaves = ready and self._leaves_when_idle(slot) and slot.warm_until_s < math.inf
        return SlotView(
            slot_id=slot_id,
            model_id=slot.model.id,
            state=slot.state,
            shares=dict(slot.shares),
            in_flight=len(slot.in_flight),
            waiting=waiting,
            priority=slot.priority_at(board.now_s, board.limits.aging_s) if ready else None,
            ready_at_s=slot.ready_at_s,
            last_used_s=slot.last_used_s,
            last_load_s=slot.last_load_s,
            warm_until_s=slot.warm_until_s if leaves else None,
            pinned=slot.model.pin,
            beneficiary=slot.beneficiary,
            noticed_by=board.demands[slot.notice.by].holder if slot.notice is not None else None,
        )

    def copy(self) -> Scheduler:
        """A scheduler in the same state, to try out what it would do."""
        twin = Scheduler(self._board.limits)
        twin._board = self._board.copy()
        twin._kept_loaded = self._kept_loaded
        return twin
