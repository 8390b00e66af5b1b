"""A world on a virtual clock for a scheduler to decide about: memory, slots that take their time, callers that come and
go. What the scheduler decides comes true here; what happens next is told to it.

Called by `replay.py` with a fresh scheduler and a stream of requests, and by whoever wants to know what a copy of a
live one would do next (`standing`: how its slots stand). Calls nothing but the scheduler. It knows no time but its own,
and moves by `step`, so that a caller may run it in slices.

1. A start gets its memory, in the ledger's order, as soon as that is free; then the load takes its model's time.
2. A stop gives the memory back a moment later.
3. A granted ticket is served after its own time where it is known, after its model's usual one else.
4. The scheduler is told of passing time once per `tick_s`, and only while that may change something: while somebody
   waits, after a slot changed, and after an idle slot has been warm for as long as it was to be.
5. Nobody else uses the devices: what other holders have when the world begins, they keep.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from inference import actions, events
from inference.events import DeviceRoom, Purpose, Shares, Ticket
from inference.model import Model
from inference.simulation.ledger import VirtualLedger
from inference.simulation.trace import Request
from inference.slot_state import SlotState

__all__ = ["STOP_S", "TICK_S", "Decides", "Standing", "Times", "Watcher", "World"]

TICK_S = 1.0
STOP_S = 0.5
"""A driver takes about so long to have an ended process's memory back."""
_LATE = 0.25
"""A request that takes longer than usual is taken to need this part of that more, or for as long as it is late."""


class Decides(Protocol):
    """A scheduler, ours or a peer's."""

    def handle(self, event: events.Event) -> list[actions.Action]:
        """Take note of the event and say what is to be done now."""

    @property
    def waiting_count(self) -> int:
        """Tickets in the queue."""


Watcher = Callable[[events.Event, Sequence[actions.Action]], None]
"""Told of every event after it was decided, with the decisions."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take."""

    load_s: Mapping[str, float]
    """By model, from the granted lease to the first answer."""
    service_s: Mapping[str, float]
    """By model, what a request uses the engine whose own time is not known."""
    stop_s: float = STOP_S
    """From a stop to the memory being free."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A slot of a live scheduler as it stands when a world begins."""

    slot_id: str
    model_id: str
    state: SlotState
    shares: Shares = field(default_factory=dict)
    """What it holds, or once its lease is granted will."""
    options: tuple[Shares, ...] = ()
    """While its lease is queued: where it may go."""
    leased: bool = True
    """Has its lease been granted?"""
    priority: int = 0
    """Class of its queued lease."""
    since_s: float = 0.0
    """When its lease was granted, for one that loads; when its stop began, for one that stops."""
    in_flight: Mapping[str, float] = field(default_factory=dict)
    """By ticket, when it was granted."""


@dataclass(slots=True, eq=False)
class _Slot:
    """The truth about one slot."""

    id: str
    model: Model
    state: SlotState = SlotState.IDLE
    life: int = 0
    """Grows with every start, so that what was to happen in an earlier life is known as such."""
    in_flight: dict[str, Ticket | None] = field(default_factory=dict)
    """None for a ticket that was there when the world began."""
    warm_until_s: float = -math.inf
    watched: bool = False
    """Is a look at it agreed on for when it has been warm long enough?"""


class World:
    """One stretch of virtual time. `step` until it is False."""

    def __init__(
        self,
        scheduler: Decides,
        *,
        devices: Iterable[DeviceRoom],
        models: Mapping[str, Model],
        times: Times,
        requests: Iterable[Request] = (),
        standing: Iterable[Standing] = (),
        now_s: float = 0.0,
        tick_s: float = TICK_S,
        watcher: Watcher | None = None,
    ) -> None:
        """`requests` are in the order they come; their `at_s` counts from `now_s` on."""
        self.now_s = now_s
        self._began_s = now_s
        self._scheduler = scheduler
        self._devices = tuple(devices)
        self._models = models
        self._times = times
        self._tick_s = tick_s
        self._watcher = watcher
        self._ledger = VirtualLedger(self._devices)
        self._slots: dict[str, _Slot] = {}
        self._service_s: dict[str, float] = {}
        """By ticket that waits, what it will take."""
        self._tickets: dict[str, Ticket] = {}
        """Those that wait."""
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = itertools.count()
        self._in_flight = 0
        self._ticking = False
        self._stirred = False
        """Has a slot changed since the last tick?"""
        self._requests: Iterator[Request] = iter(requests)
        self._next = next(self._requests, None)
        for slot in standing:
            self._stand(slot)

    # -- the clock --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tell a scheduler that knows nothing yet what devices and models there are. Not for a copy of a live one."""
        self._tell(events.DevicesRead(self.now_s, self._devices))
        self._tell(events.ModelsChanged(self.now_s, self._models))
        self._tell(events.Tick(self.now_s))

    @property
    def busy(self) -> bool:
        """Is anybody served or waiting, or on the way?"""
        return self._next is not None or self._in_flight > 0 or self._scheduler.waiting_count > 0

    def step(self) -> bool:
        """Let the next thing happen; False, and nothing happens, when nobody is left whom it could concern."""
        if not self.busy:
            return False
        request = self._next
        if request is not None and not (self._agenda and self._agenda[0][0] < self._began_s + request.at_s):
            self._next = next(self._requests, None)
            self.now_s = max(self.now_s, self._began_s + request.at_s)
            self._arrive(request)
            return True
        if not self._agenda:
            self._plan_tick()  # a live scheduler's copy may have somebody waiting before anything has happened
        self.now_s, _, happens, what = heapq.heappop(self._agenda)
        happens(*what)
        return True

    def run(self, until_s: float = math.inf) -> None:
        """Step until then, or until nobody is left."""
        while self.now_s < until_s and self.step():
            pass

    def _after(self, delay_s: float, happens: Callable[..., None], *what: object) -> None:
        self._at(self.now_s + delay_s, happens, *what)

    def _at(self, at_s: float, happens: Callable[..., None], *what: object) -> None:
        heapq.heappush(self._agenda, (max(at_s, self.now_s), next(self._numbers), happens, what))

    # -- case 4: ticks ------------------------------------------------------------------------------------------------

    def _plan_tick(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._after(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._ticking = self._stirred = False
        self._tell(events.Tick(self.now_s))

    def _watch_warmth(self, slot: _Slot) -> None:
        """Agree on a look at the idle slot for when its time is over; only one is agreed on at a time."""
        leaves = not (slot.model.pin or slot.model.preload)
        if leaves and not slot.watched and slot.warm_until_s < math.inf:
            slot.watched = True
            self._at(slot.warm_until_s, self._look_at_warmth, slot)

    def _look_at_warmth(self, slot: _Slot) -> None:
        slot.watched = False
        if slot.state is not SlotState.READY or slot.in_flight:
            return
        if slot.warm_until_s > self.now_s:  # it was used meanwhile
            self._watch_warmth(slot)
        else:
            self._plan_tick()  # not one of its own: of many slots, one leaves at almost any moment

    # -- callers ------------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        ticket = Ticket(
            id=f"virtual-{next(self._numbers)}",  # never that of a ticket that waits in the copy of a live scheduler
            model_id=request.model,
            priority=request.priority,
            submitted_at_s=self.now_s,
            client_id=request.client,
            stay_warm_s=request.stay_warm_s,
            purpose=request.purpose,
            session_id=request.session,
            cooldown_s=request.cooldown_s,
        )
        self._tickets[ticket.id] = ticket
        if request.service_s is not None:
            self._service_s[ticket.id] = request.service_s
        if request.left_s is not None:
            self._after(request.left_s, self._leave, ticket.id)
        self._tell(events.Arrived(self.now_s, ticket))

    def _leave(self, ticket_id: str) -> None:
        if self._tickets.pop(ticket_id, None) is not None:
            self._service_s.pop(ticket_id, None)
            self._tell(events.Abandoned(self.now_s, ticket_id))

    def _served(self, slot: _Slot, ticket_id: str) -> None:
        """Case 3."""
        if ticket_id not in slot.in_flight:
            return
        ticket = slot.in_flight.pop(ticket_id)
        self._in_flight -= 1
        stay_s = slot.model.stay_warm_s if ticket is None or ticket.stay_warm_s is None else ticket.stay_warm_s
        if ticket is None or ticket.purpose is not Purpose.PEEK:
            wish = ticket is not None and ticket.stay_warm_s is not None
            slot.warm_until_s = self.now_s + stay_s if wish else max(slot.warm_until_s, self.now_s + stay_s)
        self._tell(events.Served(self.now_s, ticket_id))
        if slot.state is SlotState.READY and not slot.in_flight:
            self._watch_warmth(slot)

    # -- slots --------------------------------------------------------------------------------------------------------

    def _grant_leases(self) -> None:
        """Case 1."""
        while (place := self._ledger.grant_next()) is not None:
            slot = self._slots[place.slot_id]
            slot.state = SlotState.LOADING
            self._after(self._times.load_s[slot.model.id], self._loaded, slot, slot.life)
            self._tell(events.LeaseGranted(self.now_s, slot.id, place.shares))

    def _loaded(self, slot: _Slot, life: int) -> None:
        if slot.life != life or slot.state is not SlotState.LOADING:
            return
        slot.state = SlotState.READY
        slot.warm_until_s = self.now_s + slot.model.stay_warm_s
        self._stirred = True
        self._tell(events.SlotReady(self.now_s, slot.id, self._times.load_s[slot.model.id]))
        if not slot.in_flight:
            self._watch_warmth(slot)

    def _gone(self, slot: _Slot, life: int) -> None:
        if slot.life != life:
            return
        slot.state = SlotState.IDLE
        for ticket_id in list(slot.in_flight):  # what was cut short
            self._after(0.0, self._served, slot, ticket_id)
        self._ledger.release(slot.id)
        self._stirred = True
        self._tell(events.SlotGone(self.now_s, slot.id))
        self._grant_leases()

    def _slot(self, slot_id: str, model_id: str) -> _Slot:
        slot = self._slots.get(slot_id)
        model = self._models[model_id]
        if slot is None:
            slot = self._slots[slot_id] = _Slot(slot_id, model)
        slot.model = model
        return slot

    def _stand(self, standing: Standing) -> None:
        """Take a slot over as it stands."""
        slot = self._slot(standing.slot_id, standing.model_id)
        slot.state = standing.state
        slot.life = 1
        if not standing.leased:
            options = standing.options or (standing.shares,)
            self._ledger.queue(slot.id, options, standing.priority)
            self._after(0.0, self._grant_leases)
            return
        self._ledger.hold(slot.id, standing.shares)
        match standing.state:
            case SlotState.LOADING:
                self._at(standing.since_s + self._times.load_s[slot.model.id], self._loaded, slot, slot.life)
            case SlotState.STOPPING:
                self._at(standing.since_s + self._times.stop_s, self._gone, slot, slot.life)
            case _:
                pass
        usual_s = self._times.service_s[slot.model.id]
        for ticket_id, granted_at_s in standing.in_flight.items():
            slot.in_flight[ticket_id] = None
            self._in_flight += 1
            left_s = granted_at_s + usual_s - self.now_s
            self._after(left_s if left_s > 0 else max(usual_s * _LATE, -left_s), self._served, slot, ticket_id)

    # -- event, decision, action --------------------------------------------------------------------------------------

    def _tell(self, event: events.Event) -> None:
        decided = self._scheduler.handle(event)
        if self._watcher is not None:
            self._watcher(event, decided)
        for action in decided:
            self._perform(action)
        if decided and self._ledger.stirred:
            self._grant_leases()
        if self._stirred or self._scheduler.waiting_count:
            self._plan_tick()

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.Grant(ticket_id, slot_id):
                self._granted(ticket_id, self._slots[slot_id])
            case actions.Refuse(ticket_id):
                self._tickets.pop(ticket_id, None)
                self._service_s.pop(ticket_id, None)
            case actions.Start(slot_id, model_id, options, priority, ahead_of):
                slot = self._slot(slot_id, model_id)
                slot.state, slot.life = SlotState.LOADING, slot.life + 1
                self._ledger.queue(slot_id, options, priority, ahead_of)
            case actions.Ask(slot_id, model_id, options, priority):
                slot = self._slot(slot_id, model_id)
                slot.state, slot.life = SlotState.QUEUED, slot.life + 1
                self._ledger.queue(slot_id, options, priority)
            case actions.Reprice(slot_id, priority):
                self._ledger.reprice(slot_id, priority)
            case actions.Drain(slot_id):
                self._slots[slot_id].state = SlotState.DRAINING
            case actions.Stop(slot_id):
                self._stop(self._slots[slot_id])
            case actions.Acknowledge():
                pass  # nobody listens
            case _:
                assert_never(action)

    def _granted(self, ticket_id: str, slot: _Slot) -> None:
        ticket = self._tickets.pop(ticket_id, None)
        service_s = self._service_s.pop(ticket_id, self._times.service_s[slot.model.id])
        if ticket is not None and ticket.purpose is Purpose.LOAD:
            service_s = 0.0
        slot.in_flight[ticket_id] = ticket
        self._in_flight += 1
        self._after(service_s, self._served, slot, ticket_id)

    def _stop(self, slot: _Slot) -> None:
        """Case 2."""
        held = self._ledger.holds(slot.id)
        self._ledger.withdraw(slot.id)
        slot.state = SlotState.STOPPING
        self._after(self._times.stop_s if held else 0.0, self._gone, slot, slot.life)
