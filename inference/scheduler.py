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

from gpuboss.priority import LEAST_IMPORTANT
from inference import events, refusals, yielding
from inference.actions import Action
from inference.board import Board
from inference.events import Purpose, Ticket
from inference.model import Model
from inference.plan import Plan
from inference.queue import QueueLimits
from inference.slot_state import HAS_LIFE, HOLDS_MEMORY, LEAVING, SlotState
from inference.slot_view import SlotRecord, SlotView

MAX_CRASHES = 3
"""Loads after deaths in a row, without a served ticket in between, that waiting tickets are worth."""

MOST_IMPORTANT = 0


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
        self._note(event)
        if board.shutting_down:
            return board.take_actions()
        plan = Plan(board)
        plan.run()
        while plan.again:
            plan = Plan(board)
            plan.run()
        if isinstance(event, events.Tick | events.ModelsChanged) and not plan.blocked:
            self._bring_back()
        if isinstance(event, events.Tick):
            for slot in board.holders():
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
                self._board.withdraw(event.ticket_id)
            case events.Tick():
                self._tick()
            case (
                events.LeaseGranted()
                | events.LeaseLost()
                | events.SlotReady()
                | events.SlotFailed()
                | events.SlotGone()
            ):
                slot = self._board.slots.get(event.model_id)
                if slot is not None:
                    self._slot_reported(slot, event)
            case events.Noticed() | events.Withdrawn():
                slot = self._board.slots.get(event.model_id)
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
            case _:
                assert_never(event)

    def _arrived(self, ticket: Ticket) -> None:
        board = self._board
        if ticket.id in board.line or ticket.id in board.running:
            return
        if board.shutting_down:
            board.turn_away(ticket, refusals.shutting_down())
            return
        slot = board.slots.get(ticket.model_id)
        if len(board.line) >= board.limits.max_waiting and not self._free_place(slot, ticket):
            board.turn_away(ticket, refusals.queue_full(board))
            return
        board.line.add(ticket)
        if slot is not None:
            slot.stays_out = False

    def _free_place(self, slot: SlotRecord | None, ticket: Ticket) -> bool:
        """Would the ticket be granted without waiting?"""
        if slot is None or slot.state is not SlotState.READY:
            return False
        idle_place = len(slot.in_flight) < slot.model.parallel and not self._board.line.wants(ticket.model_id)
        return idle_place or ticket.purpose is Purpose.LOAD

    def _served(self, ticket_id: str) -> None:
        board = self._board
        slot = board.running.pop(ticket_id, None)
        if slot is None:
            return
        entry = slot.in_flight.pop(ticket_id)
        slot.crashes = 0
        if entry.ticket.purpose is not Purpose.PEEK:
            slot.priority = entry.ticket.priority  # its own class: having waited long does not defend an idle slot
            slot.idle_since_s = slot.last_used_s = board.now_s
            stay_s = entry.ticket.stay_warm_s
            if stay_s is not None:
                slot.warm_until_s = board.now_s + stay_s
            else:
                # A request without a wish does not shorten what another one wished for.
                slot.warm_until_s = max(slot.warm_until_s, board.now_s + slot.model.stay_warm_s)
        if slot.state is SlotState.DRAINING and not slot.in_flight:
            board.stop(slot, "drained")

    def _slot_reported(
        self,
        slot: SlotRecord,
        event: events.LeaseGranted | events.LeaseLost | events.SlotReady | events.SlotFailed | events.SlotGone,
    ) -> None:
        board, state = self._board, slot.state
        match event:
            case events.LeaseGranted():
                if state in (SlotState.QUEUED, SlotState.LOADING, SlotState.STOPPING):
                    board.leased(slot, event.shares)
            case events.LeaseLost():
                if state in HOLDS_MEMORY:
                    slot.crashes += state not in LEAVING
                    board.lost(slot)
            case events.SlotReady():
                if state is SlotState.LOADING:
                    board.ready(slot, event.load_s)
            case events.SlotFailed():
                if state in HAS_LIFE:
                    self._failed(slot, event)
            case events.SlotGone():
                if state not in (SlotState.QUEUED, SlotState.LOADING):
                    board.gone(slot, SlotState.IDLE)
            case _:
                assert_never(event)

    def _failed(self, slot: SlotRecord, event: events.SlotFailed) -> None:
        """A load that fails takes its waiting tickets along; a slot that dies is loaded again for them, a few times."""
        board, state, model_id = self._board, slot.state, slot.model.id
        board.gone(slot, SlotState.FAILED)
        never_came_up = state in (SlotState.QUEUED, SlotState.LOADING) and not event.was_ready
        slot.crashes += state not in LEAVING
        if never_came_up or slot.crashes > MAX_CRASHES:
            slot.stays_out = True
            for entry in board.line.waiting_for(model_id):
                board.refuse(entry, event.error)

    def _noticed(self, slot: SlotRecord, event: events.Noticed | events.Withdrawn) -> None:
        """Only a lease that is held gets notice; what becomes of it, `yielding.py` says."""
        if isinstance(event, events.Withdrawn):
            self._board.withdraw_notice(slot)
        elif slot.state in HOLDS_MEMORY and slot.state is not SlotState.WEDGED:
            self._board.notice(slot, event)
            yielding.heed(self._board, slot)

    def _unload(self, model_id: str) -> None:
        board = self._board
        slot = board.slots.get(model_id)
        if slot is None and model_id in board.models:
            slot = board.slots[model_id] = SlotRecord(board.models[model_id])
        if slot is None:
            return
        slot.stays_out = True
        board.remove(slot, "unloaded by an operator")
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

    def _shut_down(self) -> None:
        board = self._board
        board.shutting_down = True
        for entry in board.line.in_order(board.now_s):
            board.refuse(entry, refusals.shutting_down())
        for slot in board.slots.values():
            board.remove(slot, "the broker shuts down")

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        board = self._board
        for entry in board.line.expired(board.now_s, board.limits.max_wait_s):
            board.refuse(entry, refusals.queue_timeout(board, entry))
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
            board.reprice(slot, MOST_IMPORTANT)
        elif slot.leased:
            priority = board.priority_of(slot)
            # A notice was given to the class the lease has; only one that would take the notice back is worth telling.
            if slot.notice is None or priority < board.demands[slot.notice.by].priority:
                board.reprice(slot, priority)

    def _bring_back(self) -> None:
        """Models that are loaded without a request take free room, evicting nobody: pinned ones first; then those that
        left for somebody outside and those to preload, by class, the one used last first.

        After a failure or an unload they wait for a request.
        """
        board = self._board
        for model in sorted(self._returners(), key=self._place_of):
            slot = board.slots.get(model.id)
            if slot is not None and (slot.stays_out or slot.state in HAS_LIFE):
                continue
            ways = board.rooms().place(model.claim_bytes)
            if ways and slot is not None and slot.returns:
                board.bring_back(model, ways)
            elif ways:
                board.start(model, ways, LEAST_IMPORTANT)

    def _returners(self) -> list[Model]:
        """Pinned and preloaded models, and those that left for somebody outside and are to stay warm still."""
        board, kept = self._board, {model.id for model in self._kept_loaded}
        back = [
            board.models[slot.model.id]
            for slot in board.slots.values()
            if slot.returns and slot.model.id in board.models and slot.model.id not in kept
            # It must have something left of its time once it is loaded.
            if board.now_s + (slot.last_load_s or 0.0) < slot.warm_until_s
        ]
        return [*self._kept_loaded, *(model for model in back if model.problem is None)]

    def _place_of(self, model: Model) -> tuple[bool, int, float]:
        slot = self._board.slots.get(model.id)
        if slot is None or slot.last_used_s is None:
            return not model.pin, LEAST_IMPORTANT, math.inf
        return not model.pin, self._board.priority_of(slot), -slot.last_used_s

    # -- looking ------------------------------------------------------------------------------------------------

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

    def in_flight(self, model_id: str) -> int:
        """Tickets that use the model's engine now."""
        slot = self._board.slots.get(model_id)
        return len(slot.in_flight) if slot is not None else 0

    def slot_view(self, model_id: str) -> SlotView:
        """The slot as the scheduler sees it; an IDLE one for a model that never was loaded."""
        board = self._board
        slot = board.slots.get(model_id)
        waiting = len(board.line.waiting_for(model_id))
        if slot is None:
            return SlotView(model_id, SlotState.IDLE, {}, 0, waiting, None, None, None, None, None, None, None)
        ready = slot.state is SlotState.READY
        leaves = ready and self._leaves_when_idle(slot) and slot.warm_until_s < math.inf
        return SlotView(
            model_id=model_id,
            state=slot.state,
            shares=dict(slot.shares),
            in_flight=len(slot.in_flight),
            waiting=waiting,
            priority=slot.priority_at(board.now_s, board.limits.aging_s) if ready else None,
            ready_at_s=slot.ready_at_s,
            last_used_s=slot.last_used_s,
            last_load_s=slot.last_load_s,
            warm_until_s=slot.warm_until_s if leaves else None,
            beneficiary=slot.beneficiary,
            noticed_by=board.demands[slot.notice.by].holder if slot.notice is not None else None,
        )
