"""Places in the queue that are kept for callers who left without having been served.

Used by `board.py`. A caller whose time ran out (ours, `max_wait_s`, or its own patience) and who asks for the same
model in the same class again within `keep_place_s` goes on where it stood: with the moment it first came, and with what
it suffered from overtaking. Without that, a caller who is less patient than a load takes would never be served. Places
are kept for callers who say who they are; each is taken once, the oldest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from inference.events import Ticket

MOST_PLACES = 4096
"""Kept at once; then the oldest is given up."""
MOST_OF_ONE = 16
"""Kept at once for one client, model and class."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where somebody stood."""

    submitted_at_s: float
    """When they first came."""
    until_s: float
    """How long the place is kept."""
    overtakes: int = 0
    """How often they had been overtaken, if they led the line of their model."""
    since_s: float | None = None
    """And since when."""


class KeptPlaces:
    """The kept places of every client. One writer: `board.py`."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, int], deque[Place]] = {}
        """By client, model and class, in the order they were left; the client who left last comes last."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, ticket: Ticket, place: Place) -> None:
        """Keep the place of a ticket that leaves; nothing for a caller without a name."""
        if ticket.client_id is None:
            return
        key = ticket.client_id, ticket.model_id, ticket.priority
        if len(self._places.get(key, ())) >= MOST_OF_ONE:
            return
        places = self._places.pop(key, None) or deque()
        places.append(place)
        self._places[key] = places
        self._count += 1
        if self._count > MOST_PLACES:
            self._drop(next(iter(self._places)))

    def take(self, ticket: Ticket, now_s: float) -> Place | None:
        """The oldest place kept for a ticket that comes; None when there is none."""
        if ticket.client_id is None:
            return None
        key = ticket.client_id, ticket.model_id, ticket.priority
        while key in self._places:
            place = self._places[key][0]
            self._drop(key)
            if place.until_s >= now_s:
                return place
        return None

    def forget(self, now_s: float) -> None:
        """Give up those whose time is over."""
        for key in list(self._places):
            while key in self._places and self._places[key][0].until_s < now_s:
                self._drop(key)

    def copy(self) -> KeptPlaces:
        """The same places, to be changed apart."""
        twin = KeptPlaces()
        twin._places = {key: deque(places) for key, places in self._places.items()}
        twin._count = self._count
        return twin

    def _drop(self, key: tuple[str, str, int]) -> None:
        """Take out the first place of that key."""
        places = self._places[key]
        places.popleft()
        self._count -= 1
        if not places:
            del self._places[key]
