"""What happened in a pool, taken down from the events its scheduler was told and the decisions it made of them.

Called by `world.py` as its watcher; read by `report.py` and `plots.py`. Knows nothing of how the decisions were made,
so that it counts for every policy alike.

Overtaking is counted from the outside: when a load begins for which others have to go, the first who waits for it was
overtaken by every ticket that those took since it came, that came after it and is not of a more important class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from inference import actions, events
from inference.errors import InferenceError
from inference.events import Purpose, Shares, Ticket

__all__ = ["End", "Journal", "Load", "Turn", "code_of"]


def code_of(error: InferenceError) -> str:
    """What the API calls the refusal: `will_never_fit`."""
    return re.sub(r"\B(?=[A-Z])", "_", type(error).__name__).lower()


class End(Enum):
    """How a request ended."""

    SERVED = "served"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class Turn:
    """One request's way through the pool."""

    ticket: Ticket
    granted_s: float | None = None
    done_s: float | None = None
    """When it was served, refused or gone."""
    end: End | None = None
    """None while it is on its way."""
    error: str | None = None
    """The code of the refusal."""
    overtaken: int = 0
    """How often, while it waited for those who had to go for its load."""
    overtaken_s: float = 0.0
    """Seconds from the first of that to its turn."""

    @property
    def waited_s(self) -> float | None:
        """Seconds to its grant; None when it had none."""
        return None if self.granted_s is None else self.granted_s - self.ticket.submitted_at_s


@dataclass(slots=True, eq=False)
class Load:
    """One life of a slot."""

    slot_id: str
    model_id: str
    began_s: float
    """When it was decided."""
    victims: tuple[str, ...] = ()
    """The slots that had to go for it."""
    shares: Shares = field(default_factory=dict)
    held_from_s: float | None = None
    ready_s: float | None = None
    gone_s: float | None = None
    busy_s: float = 0.0
    """Seconds in which it had work."""
    busy_since_s: float | None = None
    in_flight: int = 0
    taken: list[Ticket] = field(default_factory=list)
    """The tickets it was granted, and below when."""
    taken_s: list[float] = field(default_factory=list)


class Journal:
    """The watcher of a world. `close` it at the end."""

    def __init__(self) -> None:
        self.turns: dict[str, Turn] = {}
        """By ticket, in the order they came."""
        self.loads: list[Load] = []
        """In the order they began."""
        self.queue: list[tuple[float, int]] = []
        """How many waited, from which moment on."""
        self.now_s = 0.0
        self._lives: dict[str, Load] = {}
        """The present life of each slot."""
        self._where: dict[str, Load] = {}
        """By ticket in flight, who serves it."""
        self._waiting: dict[str, dict[str, Turn]] = {}
        """By model, who waits for it."""
        self._count = 0

    def __call__(self, event: events.Event, decided: Sequence[actions.Action]) -> None:
        """Take down an event and what was decided on it."""
        self.now_s, before = event.at_s, self._count
        self._note(event)
        self._note_starts(decided)
        for action in decided:
            match action:
                case actions.Grant(ticket_id, slot_id):
                    self._granted(ticket_id, self._lives[slot_id])
                case actions.Refuse(ticket_id, error):
                    self._ended(ticket_id, End.REFUSED, code_of(error))
                case _:
                    pass
        if self._count != before:
            self.queue.append((self.now_s, self._count))

    def close(self) -> None:
        """Count what still goes on up to the last moment."""
        for load in self._lives.values():
            self._over(load)

    # -- events -------------------------------------------------------------------------------------------------------

    def _note(self, event: events.Event) -> None:
        match event:
            case events.Arrived():
                turn = self.turns[event.ticket.id] = Turn(event.ticket)
                self._waiting.setdefault(event.ticket.model_id, {})[event.ticket.id] = turn
                self._count += 1
            case events.Served():
                self._served(event.ticket_id)
            case events.Abandoned():
                self._ended(event.ticket_id, End.LEFT)
            case events.LeaseGranted():
                load = self._lives[event.slot_id]
                load.shares, load.held_from_s = event.shares, self.now_s
            case events.SlotReady():
                self._lives[event.slot_id].ready_s = self.now_s
            case events.SlotGone() if event.slot_id in self._lives:
                self._over(self._lives.pop(event.slot_id))
            case _:
                pass

    def _served(self, ticket_id: str) -> None:
        load, turn = self._where.pop(ticket_id), self.turns[ticket_id]
        turn.end, turn.done_s = End.SERVED, self.now_s
        load.in_flight -= 1
        if not load.in_flight and load.busy_since_s is not None:
            load.busy_s += self.now_s - load.busy_since_s
            load.busy_since_s = None

    def _ended(self, ticket_id: str, end: End, error: str | None = None) -> None:
        """It leaves the queue without a grant."""
        turn = self.turns[ticket_id]
        if self._waiting[turn.ticket.model_id].pop(ticket_id, None) is not None:
            self._count -= 1
            turn.end, turn.done_s, turn.error = end, self.now_s, error

    def _over(self, load: Load) -> None:
        load.gone_s = self.now_s
        if load.busy_since_s is not None:
            load.busy_s += self.now_s - load.busy_since_s
            load.busy_since_s = None

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _note_starts(self, decided: Sequence[actions.Action]) -> None:
        """Whoever is told to go right after a start goes for its sake: that is the order of decisions."""
        load: Load | None = None
        victims: list[str] = []
        for action in decided:
            match action:
                case actions.Start(slot_id, model_id) | actions.Ask(slot_id, model_id):
                    self._begun(load, victims)
                    load, victims = Load(slot_id, model_id, self.now_s), []
                case actions.Drain(slot_id) | actions.Stop(slot_id) if load is not None and slot_id not in victims:
                    victims.append(slot_id)
                case _:
                    pass
        self._begun(load, victims)

    def _begun(self, load: Load | None, victims: list[str]) -> None:
        if load is None:
            return
        load.victims = tuple(victims)
        self.loads.append(load)
        if load.slot_id not in self._lives:  # else it was queued for others' memory, and found room elsewhere
            self._lives[load.slot_id] = load
        if victims:
            self._count_overtakes(load)

    def _count_overtakes(self, load: Load) -> None:
        waiting = self._waiting.get(load.model_id)
        if not waiting:
            return
        turn = min(waiting.values(), key=lambda one: (one.ticket.priority, one.ticket.submitted_at_s))
        came_s, priority = turn.ticket.submitted_at_s, turn.ticket.priority
        first_s = self.now_s
        for victim in load.victims:
            life = self._lives.get(victim)
            if life is None:
                continue
            for index in range(len(life.taken) - 1, -1, -1):
                taken, at_s = life.taken[index], life.taken_s[index]
                if at_s < came_s:
                    break
                if taken.submitted_at_s > came_s and taken.priority >= priority:
                    turn.overtaken += 1
                    first_s = min(first_s, at_s)
        turn.overtaken_s = self.now_s - first_s

    def _granted(self, ticket_id: str, load: Load) -> None:
        turn = self.turns[ticket_id]
        del self._waiting[turn.ticket.model_id][ticket_id]
        self._count -= 1
        turn.granted_s = self.now_s
        self._where[ticket_id] = load
        if turn.ticket.purpose is not Purpose.LOAD:
            load.taken.append(turn.ticket)
            load.taken_s.append(self.now_s)
        load.in_flight += 1
        if load.busy_since_s is None:
            load.busy_since_s = self.now_s
