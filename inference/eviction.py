"""Who must go: the loaded models whose memory makes room for a waiting one.

Called by `plan.py` and `overtaking.py`; calls `placement.py`. A set of victims is better the less important its most
important member is, then the cheaper that one is: seconds to load it again per second it has idled. Greedy: candidates
are added in the order they would have to go until the set suffices; then those it can do without are dropped, the most
important first. If all together do not suffice, nobody goes.

1. Pinned models are no candidates (`sight.py` leaves them out).
2. An idle one yields to the same or a more important class, a busy one to a strictly more important class only.
3. So does an idle one that has just been loaded (`min_residency_s`), until somebody was kept waiting long enough.
4. One that is loading yields only when nobody wants it any more: to a strictly more important class at once, to anybody
   once nobody has wanted it for `load_grace_s`. A caller who lost patience finds its model loaded when it asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from gpuboss.priority import LEAST_IMPORTANT
from inference.events import Shares
from inference.placement import Groups, spread

UNWANTED = LEAST_IMPORTANT + 1
"""Class of a load that nobody waits for: it goes before everything else."""


class Activity(Enum):
    """What a candidate is doing."""

    IDLE = "idle"
    """Loaded, and nothing in flight."""
    BUSY = "busy"
    """Loaded, with requests in flight."""
    LOADING = "loading"
    """Being loaded for somebody who waits."""
    ORPHANED = "orphaned"
    """Being loaded for somebody who left a moment ago."""
    UNWANTED = "unwanted"
    """Being loaded although nobody has waited for it for some time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A slot that may have to go."""

    slot_id: str
    shares: Shares
    """What its going frees."""
    priority: int
    """Class of its most important request in flight, else of its last work, fallen while it idled."""
    activity: Activity
    cost: float
    """Seconds to load it again, per second it has been idle."""
    resident: bool = False
    """It was loaded so short a time ago that its load would have been in vain."""

    @property
    def stays_on(self) -> bool:
        """Is it still there only because it was just loaded?"""
        return self.resident and self.activity is Activity.IDLE

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts those who go first to the front."""
        return -self.priority, self.cost, self.slot_id

    def yields_to(self, priority: int, *, overdue: bool = False) -> bool:
        """May it be sent away now, for a ticket of this class? `overdue`: one that was kept waiting long enough."""
        match self.activity:
            case Activity.IDLE if not self.resident or overdue:
                return self.priority >= priority  # case 2
            case Activity.IDLE | Activity.BUSY | Activity.ORPHANED:
                return self.priority > priority  # cases 2, 3 and 4
            case Activity.LOADING:
                return False
            case Activity.UNWANTED:
                return True

    def will_yield_to(self, priority: int) -> bool:
        """May it be sent away for that class once it has finished what it is doing?"""
        return self.priority >= priority


def choose(
    need: int, rooms: Mapping[str, int], candidates: Iterable[Candidate], groups: Groups
) -> tuple[Candidate, ...] | None:
    """The victims, of `candidates` in rank order, without whom `need` bytes do not fit; None when all are too few.

    `rooms` are the free bytes by device without any victim.
    """
    trial = dict(rooms)
    group_of = {device: group for group in groups for device in group}
    chosen: list[Candidate] = []
    for candidate in candidates:
        suffices = False
        for device, size in candidate.shares.items():
            if device in trial:
                trial[device] += size
                suffices = suffices or trial[device] >= need
        chosen.append(candidate)
        touched = {group_of[device] for device in candidate.shares if device in group_of} if groups else ()
        suffices = suffices or any(spread(trial[device] for device in group) >= need for group in touched)
        if suffices:
            # Without it nothing sufficed, so it can only be there that the rest suffices.
            places = tuple(device for device in candidate.shares if device in trial)
            return _without_redundant(need, trial, chosen, places, tuple(touched))
    return None


def _without_redundant(
    need: int, trial: dict[str, int], chosen: list[Candidate], devices: tuple[str, ...], groups: Groups
) -> tuple[Candidate, ...]:
    """Drop whom the set can do without, the most important first. `trial` is the room with all of them gone."""
    kept: list[Candidate] = []
    for candidate in reversed(chosen):
        for device, size in candidate.shares.items():
            if device in trial:
                trial[device] -= size
        whole = any(trial[device] >= need for device in devices)
        if not (whole or any(spread(trial[device] for device in group) >= need for group in groups)):
            kept.append(candidate)
            for device, size in candidate.shares.items():
                if device in trial:
                    trial[device] += size
    return tuple(reversed(kept))
