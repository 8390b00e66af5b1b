"""The scheduler's own picture of one slot, and the frozen copy of it for people.

`SlotRecord` is written by `board.py` alone; `slot.py` holds the truth and reports it as events. `SlotView` is what
`Scheduler.slot_view` hands out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gpuboss.priority import LEAST_IMPORTANT
from inference.demand import Notice
from inference.events import Shares
from inference.model import Model
from inference.queue import Entry, fallen
from inference.slot_state import LEAVING, SlotState

RESIDENT_LOADS = 3
"""A model stays for as many times its load as this, where nothing else is configured."""
_SHORTEST_IDLE_S = 0.001
"""Keeps the cost of a slot that became idle this moment finite."""


MOST_SESSIONS = 1024
"""Conversations a slot remembers; the one longest silent is forgotten first."""


@dataclass(slots=True, eq=False)
class SlotRecord:
    """What the scheduler knows of one slot of a model. Outlives the load: the times of the last one stay."""

    id: str
    """The model's id; of further slots `model#2` and so on."""
    model: Model
    """As it was when the slot was started: a changed manifest applies to the next load, but its rules at once."""
    state: SlotState = SlotState.IDLE
    moved_at_s: float = -math.inf
    """When it came into that state; while it loads, when its lease was granted."""
    shares: Shares = field(default_factory=dict)
    """Bytes by device that count as taken: the first option until the lease says otherwise."""
    leased: bool = False
    """Has the lease been granted?"""
    in_flight: dict[str, Entry] = field(default_factory=dict)
    """Granted tickets by id, with the class they had risen to at their grant."""
    granted_at_s: dict[str, float] = field(default_factory=dict)
    """When, by id."""
    sessions: dict[str, None] = field(default_factory=dict)
    """The conversations whose last request it had, the one longest silent first."""
    taken: int = 0
    """Tickets granted since the slot became ready."""
    priority: int = LEAST_IMPORTANT
    """Class of its last work; until there was any, of the ticket it was loaded for."""
    idle_since_s: float = 0.0
    """When that work ended, or the load."""
    ready_at_s: float | None = None
    last_used_s: float | None = None
    last_load_s: float | None = None
    """Seconds its last load took."""
    warm_since_s: float = -math.inf
    """From when on it stays warm for as long as its model says."""
    wished_until_s: float = -math.inf
    """Until when it stays by the wish of a request."""
    beneficiary: str | None = None
    """The model it is leaving for."""
    short_since_s: float | None = None
    """While its lease is queued: since when the room it waits for is claimed by more than fits."""
    unwanted_since_s: float | None = None
    """While it loads: since when nobody waits for its model."""
    stays_out: bool = False
    """Not loaded again without a request: its load failed, or an operator unloaded it."""
    asked: tuple[Shares, ...] = ()
    """While its lease is queued for others' memory: the options it asks for."""
    coming: Shares = field(default_factory=dict)
    """What others were told to yield to it meanwhile."""
    lease_priority: int = LEAST_IMPORTANT
    """The class its lease, queued or held, was last given."""
    repriced: bool = False
    """That is another than it was asked for with."""
    notice: Notice | None = None
    """The ledger asks it to yield."""
    yields_to: str | None = None
    """The demand it is leaving for: its memory is promised there."""
    returns: bool = False
    """It left for a demand, not for want of use: it comes back when there is room."""

    @property
    def has_place(self) -> bool:
        """Could it take one more ticket now?"""
        return self.state is SlotState.READY and len(self.in_flight) < self.model.parallel

    @property
    def warm_until_s(self) -> float:
        """When it has been idle for long enough to leave; a changed rule of its model counts from its last use on."""
        return max(self.wished_until_s, self.warm_since_s + self.model.stay_warm_s)

    def stay_warm(self, now_s: float, wish_s: float | None = None) -> None:
        """It was used until now, by somebody who wished it to stay for so long.

        Who wishes nothing does not shorten what another one wished for.
        """
        if wish_s is None:
            self.warm_since_s = now_s
        else:
            self.warm_since_s, self.wished_until_s = -math.inf, now_s + wish_s

    @property
    def settled(self) -> bool:
        """Is there nothing to decide for those who wait: is it loading with its lease, or leaving?

        A slot that is queued for others' memory is not: room may be found elsewhere meanwhile. Nor is a wedged one.
        """
        return self.state is not SlotState.WEDGED and (self.leased or self.state in LEAVING)

    def priority_at(self, now_s: float, aging_s: float) -> int:
        """The class it defends itself with: the best of its work in flight and its last work, that fallen with time.

        The last work counts beside that in flight, or an idle slot would lose its protection by taking a lesser ticket.
        """
        if self.state is SlotState.LOADING:
            return self.priority
        last = fallen(self.priority, int((now_s - self.idle_since_s) / aging_s))
        return min(last, *(entry.priority for entry in self.in_flight.values())) if self.in_flight else last

    def owes(self, entry: Entry, now_s: float, turn_s: float) -> bool:
        """Is it the ticket's turn by this very load? It is for the first batch of those who waited when it was ready.

        For more of them for `turn_s`. A load that is followed by the next one at once would have been in vain.
        """
        ready_at_s = self.ready_at_s
        if ready_at_s is None or entry.submitted_at_s >= ready_at_s:
            return False
        return self.taken < self.model.parallel or now_s < ready_at_s + turn_s

    def resident_until_s(self, min_residency_s: float | None) -> float:
        """Until when it has just been loaded; `min_residency_s` is for models that do not say, None three loads."""
        if self.ready_at_s is None:
            return -math.inf
        own = self.model.min_residency_s
        wanted = own if own is not None else min_residency_s
        return self.ready_at_s + (wanted if wanted is not None else RESIDENT_LOADS * (self.last_load_s or 0.0))

    def remember_session(self, session_id: str) -> None:
        """Its conversation goes on here."""
        self.sessions.pop(session_id, None)
        self.sessions[session_id] = None
        if len(self.sessions) > MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]

    def cost_at(self, now_s: float) -> float:
        """Seconds to load it again per second it has been idle."""
        idle_s = 0.0 if self.in_flight else now_s - self.idle_since_s
        return (self.last_load_s or 0.0) / max(idle_s, _SHORTEST_IDLE_S)


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot, for people."""

    slot_id: str
    model_id: str
    state: SlotState
    shares: Shares = field(default_factory=dict)
    """Claimed bytes by device; empty when nothing is."""
    in_flight: int = 0
    waiting: int = 0
    """Tickets that wait for this model."""
    priority: int | None = None
    """The class it defends itself with; None while it is not ready."""
    ready_at_s: float | None = None
    """Monotonic; None when it never was."""
    last_used_s: float | None = None
    last_load_s: float | None = None
    warm_until_s: float | None = None
    """When it leaves if it stays idle, monotonic; None when it does not leave by itself, or is not ready."""
    pinned: bool = False
    """As its manifest says now."""
    beneficiary: str | None = None
    """The model it makes room for."""
    noticed_by: str | None = None
    """Who outside waits for its memory, for people; None when nobody does."""
