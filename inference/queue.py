"""Who is next: the waiting tickets in order, their ageing and their places.

Called by `board.py` (tickets come and go) and `plan.py` (whose turn is it); calls nothing. Everything is kept sorted,
per model and per class, so that an arrival, a departure and a look at the heads cost the same with ten tickets and with
ten thousand.

A client that rests between two requests (`client_cooldown_s`) keeps its places, but its tickets are nobody's turn until
it is done resting.

Order: class, then submission. A class is a number, lower is more important. Ageing: the oldest ticket of a class counts
one class higher per `aging_s` that it waits, up to `high` at most. Once it is granted, the next one starts to age: a
backlog moves up ticket by ticket, not as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuboss.priority import CLASSES, LEAST_IMPORTANT
from inference.events import Purpose, Ticket

HIGH = CLASSES["high"]
"""The class beyond which no ticket ages."""
LADDER = (*sorted(CLASSES.values()), LEAST_IMPORTANT)
"""The steps of ageing tickets (downwards) and fading slots (upwards)."""
SHORTEST_AGING_S = 0.001
"""Keeps the number of steps one that can be counted."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The bounds of waiting: the `queue:` section of model-boss.yaml and `min_residency_s` beside it.

    ValueError for values that cannot be meant.
    """

    max_waiting: int = 512
    """Tickets that may wait at once; the next is refused."""
    max_wait_s: float = 300.0
    """Seconds a ticket may wait, loading included."""
    max_overtakes: int = 16
    """Tickets for loaded models that may pass a ticket while it leads the queue of a model that is not loaded."""
    max_overtaken_s: float = 20.0
    """Seconds, from the first such overtaking, after which there is no further one; and, from when a model is ready,
    in which those who waited for it then are served, whoever else waits."""
    aging_s: float = 60.0
    """Seconds of waiting per class that a ticket rises, and of idling per class that a slot falls."""
    load_grace_s: float = 10.0
    """Seconds a load goes on for callers who left, though others of their class wait for its memory."""
    keep_place_s: float = 120.0
    """Seconds the place of a caller who left is kept, for the same client and model."""
    client_cooldown_s: float = 0.0
    """Seconds a client's tickets wait after one of its requests is done, where it does not say otherwise."""
    min_residency_s: float | None = None
    """Seconds a model that has just been loaded is safe from its equals; None: three times what its load took."""

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_wait_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"queue.{name} is {getattr(self, name)}; it must be more than 0")
        if not self.aging_s >= SHORTEST_AGING_S:
            raise ValueError(f"queue.aging_s is {self.aging_s}; it must be at least {SHORTEST_AGING_S}")
        for name in ("max_overtakes", "max_overtaken_s", "load_grace_s", "keep_place_s", "client_cooldown_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"queue.{name} is {getattr(self, name)}; it must not be negative")
        if self.min_residency_s is not None and not self.min_residency_s >= 0:
            raise ValueError(f"min_residency_s is {self.min_residency_s}; it must not be negative")


class Entry(NamedTuple):
    """A ticket in line. Compares as the queue is ordered; `seq` is unique, so the ticket itself is never compared."""

    priority: int
    """Its class; after ageing, the better one."""
    submitted_at_s: float
    seq: int
    """Order of arrival."""
    ticket: Ticket

    def passes(self, leader: Entry) -> bool:
        """Does a grant to it overtake the leader: is it less important, or did it come later?

        A place that was kept for it says where it stands in its own model's line, and no more: else as many as once
        left would pass one who stays.
        """
        return (self.priority, self.ticket.submitted_at_s, self.seq) > leader[:3]


Aged = Mapping[str, list[Entry]]
"""Per model the tickets that count for more than their own class now, best first."""


def risen(priority: int, steps: int) -> int:
    """The class after ageing by `steps`: each step is the next named class, `high` at most."""
    for step in reversed(LADDER):
        if steps <= 0:
            break
        if HIGH <= step < priority:
            priority, steps = step, steps - 1
    return priority


def fallen(priority: int, steps: int) -> int:
    """The class of a slot that idled for `steps`: each step is the next less important named class."""
    for step in LADDER:
        if steps <= 0:
            break
        if step > priority:
            priority, steps = step, steps - 1
    return priority


class _ModelLine:
    """The tickets that wait for one model."""

    __slots__ = ("loads", "peeks", "work")

    def __init__(self) -> None:
        self.work: list[Entry] = []
        """Those that will use the engine: INFER and PEEK."""
        self.loads: list[Entry] = []
        """Those served by the model's being loaded."""
        self.peeks = 0
        """How many of `work` are PEEK."""

    def copy(self) -> _ModelLine:
        twin = _ModelLine()
        twin.work, twin.loads, twin.peeks = list(self.work), list(self.loads), self.peeks
        return twin


class WaitingLine:
    """All waiting tickets. One writer: `board.py`."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._entries: dict[str, Entry] = {}
        self._models: dict[str, _ModelLine] = {}
        self._classes: dict[int, list[Entry]] = {}
        """Per class all its tickets, oldest first."""
        self._oldest_served_at_s: dict[int, float] = {}
        """Per class the moment its oldest ticket was last granted."""
        self._clients: dict[str, set[str]] = {}
        """The ids of the tickets of those who say who they are."""
        self._resting: set[str] = set()
        """Clients whose tickets are in `_entries` alone."""
        self._seq = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._entries

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, ticket: Ticket, since_s: float | None = None) -> Entry:
        """Put a ticket, not yet in line, at its place, which may be that of somebody who came before it."""
        self._seq += 1
        submitted_at_s = ticket.submitted_at_s if since_s is None else since_s
        entry = Entry(ticket.priority, submitted_at_s, self._seq, ticket)
        self._entries[ticket.id] = entry
        if ticket.client_id is not None:
            self._clients.setdefault(ticket.client_id, set()).add(ticket.id)
        if ticket.client_id not in self._resting:
            self._line_up(entry)
        return entry

    def remove(self, ticket_id: str) -> Entry | None:
        """Take a ticket out of line; None when it is not there."""
        entry = self._entries.pop(ticket_id, None)
        if entry is None:
            return None
        client = entry.ticket.client_id
        if client not in self._resting:
            self._step_out(entry)
        if client is not None:
            self._clients[client].discard(ticket_id)
            if not self._clients[client]:
                del self._clients[client]
        return entry

    def rest(self, client_id: str) -> set[str]:
        """Nothing of the client has its turn from now on; the models it waits for."""
        entries = [self._entries[ticket_id] for ticket_id in self._clients.get(client_id, ())]
        if client_id not in self._resting:
            for entry in entries:
                self._step_out(entry)
            self._resting.add(client_id)
        return {entry.ticket.model_id for entry in entries}

    def wake(self, client_id: str) -> None:
        """What the client waits for may have its turn again."""
        if client_id in self._resting:
            self._resting.discard(client_id)
            for ticket_id in self._clients.get(client_id, ()):
                self._line_up(self._entries[ticket_id])

    def _line_up(self, entry: Entry) -> None:
        ticket = entry.ticket
        line = self._models.get(ticket.model_id)
        if line is None:
            line = self._models[ticket.model_id] = _ModelLine()
        insort(line.loads if ticket.purpose is Purpose.LOAD else line.work, entry)
        line.peeks += ticket.purpose is Purpose.PEEK
        insort(self._classes.setdefault(entry.priority, []), entry)

    def _step_out(self, entry: Entry) -> None:
        ticket = entry.ticket
        line = self._models[ticket.model_id]
        entries = line.loads if ticket.purpose is Purpose.LOAD else line.work
        del entries[bisect_left(entries, entry)]
        line.peeks -= ticket.purpose is Purpose.PEEK
        if not line.work and not line.loads:
            del self._models[ticket.model_id]
        peers = self._classes[entry.priority]
        del peers[bisect_left(peers, entry)]
        if not peers:
            del self._classes[entry.priority]

    def granted(self, ticket_id: str, at_s: float) -> None:
        """Take a ticket out of line because it has its turn."""
        entry = self._entries.get(ticket_id)
        if entry is not None and (peers := self._classes.get(entry.priority)) and peers[0] == entry:
            self._oldest_served_at_s[entry.priority] = at_s
        self.remove(ticket_id)

    # -- whose turn ---------------------------------------------------------------------------------------------

    def aged(self, now_s: float) -> Aged:
        """The tickets that have risen, by model: at most one of each class, the oldest."""
        risers: dict[str, list[Entry]] = {}
        for priority, entries in self._classes.items():
            if priority <= HIGH:
                continue
            oldest = entries[0]
            since_s = max(oldest.submitted_at_s, self._oldest_served_at_s.get(priority, oldest.submitted_at_s))
            steps = int((now_s - since_s) / self._aging_s)
            if steps > 0:
                insort(risers.setdefault(oldest.ticket.model_id, []), oldest._replace(priority=risen(priority, steps)))
        return risers

    def models(self) -> Collection[str]:
        """The models somebody waits for."""
        return self._models.keys()

    def wants(self, model_id: str) -> bool:
        """Does anybody wait for the model?"""
        return model_id in self._models

    def next_for_ready(self, model_id: str, aged: Aged) -> Entry | None:
        """The next ticket that would use the loaded model's engine."""
        line = self._models.get(model_id)
        if line is None or not line.work:
            return None
        if model_id in aged:
            for riser in aged[model_id]:
                if riser.ticket.purpose is not Purpose.LOAD and riser.ticket.id in self._entries:
                    return min(riser, line.work[0])
        return line.work[0]

    def leader(self, model_id: str, aged: Aged) -> Entry:
        """The ticket on whose account the model (somebody waits for it) would be loaded; a PEEK only if all are."""
        line = self._models[model_id]
        if not (line.loads or line.peeks or model_id in aged):
            return line.work[0]
        firsts = line.loads[:1]
        if len(line.work) > line.peeks:
            firsts.append(next(entry for entry in line.work if entry.ticket.purpose is not Purpose.PEEK))
        elif not firsts:
            return line.work[0]
        firsts += [riser for riser in aged.get(model_id, ()) if riser.ticket.purpose is not Purpose.PEEK]
        return min(firsts)

    def loads(self, model_id: str, aged: Aged) -> list[Entry]:
        """The tickets that wait for nothing but the model's (somebody waits for it) being loaded."""
        loads = self._models[model_id].loads
        if not loads:
            return []
        risen_now = {riser.seq: riser for riser in aged.get(model_id, ())}
        return [risen_now.get(entry.seq, entry) for entry in loads]

    def waiting_for(self, model_id: str) -> list[Entry]:
        """Everyone who waits for the model, those of resting clients too, next first."""
        line = self._models.get(model_id)
        resting = [entry for entry in self._of_the_resting() if entry.ticket.model_id == model_id]
        return sorted(line.loads + line.work + resting) if line is not None else sorted(resting)

    # -- for limits and people ----------------------------------------------------------------------------------

    def expired(self, now_s: float, max_wait_s: float) -> list[Entry]:
        """The tickets that have waited too long; what somebody waited at a place before does not count."""
        suspects = self._of_the_resting()
        for entries in self._classes.values():
            suspects += entries[: bisect_right(entries, now_s - max_wait_s, key=_submitted_at_s)]
        return [entry for entry in suspects if now_s - entry.ticket.submitted_at_s >= max_wait_s]

    def entry(self, ticket_id: str) -> Entry | None:
        """The ticket's place; None when it does not wait."""
        return self._entries.get(ticket_id)

    def copy(self) -> WaitingLine:
        """The same line, to be changed apart."""
        twin = WaitingLine(self._aging_s)
        twin._entries = dict(self._entries)
        twin._models = {model_id: line.copy() for model_id, line in self._models.items()}
        twin._classes = {priority: list(entries) for priority, entries in self._classes.items()}
        twin._oldest_served_at_s = dict(self._oldest_served_at_s)
        twin._clients = {client: set(ids) for client, ids in self._clients.items()}
        twin._resting = set(self._resting)
        twin._seq = self._seq
        return twin

    @property
    def oldest_s(self) -> float | None:
        """When the first of those who have a turn came, or stood at their place; None when nobody waits."""
        return min((entries[0].submitted_at_s for entries in self._classes.values()), default=None)

    def position(self, ticket_id: str) -> tuple[int, int]:
        """(k, n): the ticket is the k-th of n by class and submission; (0, n) when it does not wait."""
        entry = self._entries.get(ticket_id)
        if entry is None:
            return 0, len(self._entries)
        ahead = sum(bisect_left(line.work, entry) + bisect_left(line.loads, entry) for line in self._models.values())
        return ahead + 1, len(self._entries)

    def in_order(self, now_s: float) -> list[Entry]:
        """All entries, next first, with the classes they have risen to."""
        risen_now = {riser.seq: riser for risers in self.aged(now_s).values() for riser in risers}
        return sorted(risen_now.get(entry.seq, entry) for entry in self._entries.values())

    def _of_the_resting(self) -> list[Entry]:
        few, many = sorted((self._resting, self._clients.keys()), key=len)
        return sorted(
            self._entries[ticket_id] for client in few if client in many for ticket_id in self._clients[client]
        )


def _submitted_at_s(entry: Entry) -> float:
    return entry.submitted_at_s
