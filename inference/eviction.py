"""Who must go: the loaded models whose memory makes room for a waiting one.

Called by `plan.py` and `overtaking.py`; calls `placement.py`. A set of victims is better the less important its most
important member is, then the cheaper that one is: seconds to load it again per second it has idled. Greedy: candidates
are added in the order they would have to go until the set suffices; then those it can do without are dropped, the most
important first. If all together do not suffice, nobody goes.

1. Pinned models are no candidates (`sight.py` leaves them out).
2. An idle one yields to the same or a more important class, a busy one to a strictly more important class only.
3. One that is loading yields only when nobody wants it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from gpuboss.priority import LEAST_IMPORTANT
from inference.events import Shares
from inference.placement import MARGIN_BYTES, fits

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
    UNWANTED = "unwanted"
    """Being loaded although nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A slot that may have to go."""

    model_id: str
    shares: Shares
    """What its going frees."""
    priority: int
    """Class of its most important request in flight, else of its last work, fallen while it idled."""
    activity: Activity
    cost: float
    """Seconds to load it again, per second it has been idle."""

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts those who go first to the front."""
        return -self.priority, self.cost, self.model_id

    def yields_to(self, priority: int) -> bool:
        """Cases 2 and 3: may it be sent away now, for a ticket of this class?"""
        match self.activity:
            case Activity.IDLE:
                return self.priority >= priority
            case Activity.BUSY:
                return self.priority > priority
            case Activity.LOADING:
                return False
            case Activity.UNWANTED:
                return True

    def will_yield_to(self, priority: int) -> bool:
        """May it be sent away for that class once it has finished what it is doing?"""
        return self.priority >= priority


def choose(
    need: int, rooms: Mapping[str, int], candidates: Iterable[Candidate], *, may_split: bool
) -> tuple[Candidate, ...] | None:
    """The victims, of `candidates` in rank order, without whom `need` bytes do not fit; None when all are too few.

    `rooms` are the free bytes by device without any victim.
    """
    trial = dict(rooms)
    spread = sum(max(0, room - MARGIN_BYTES) for room in trial.values()) if may_split else 0
    chosen: list[Candidate] = []
    for candidate in candidates:
        suffices = False
        for device, size in candidate.shares.items():
            if device not in trial:
                continue
            before, after = trial[device], trial[device] + size
            trial[device] = after
            if may_split:
                spread += max(0, after - MARGIN_BYTES) - max(0, before - MARGIN_BYTES)
            suffices = suffices or after >= need
        chosen.append(candidate)
        if suffices or (may_split and spread >= need):
            return _without_redundant(need, trial, chosen, may_split=may_split)
    return None


def _without_redundant(
    need: int, trial: dict[str, int], chosen: list[Candidate], *, may_split: bool
) -> tuple[Candidate, ...]:
    """Drop whom the set can do without, the most important first. `trial` is the room with all of them gone."""
    kept: list[Candidate] = []
    for candidate in reversed(chosen):
        without = dict(trial)
        for device, size in candidate.shares.items():
            if device in without:
                without[device] -= size
        if fits(need, without, may_split=may_split):
            trial = without
        else:
            kept.append(candidate)
    return tuple(reversed(kept))
