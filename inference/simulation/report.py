"""The figures of one simulated run: how long who waited, how often models were swapped, what the devices did, how fair
it was.

Made by `replay.py` from a `Journal`; shown by `coordinator/cli/simulate.py`, drawn by `plots.py`. Seconds and shares of
one, no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuboss.priority import name_of
from inference.placement import usable
from inference.simulation.journal import End, Journal, Turn
from inference.simulation.trace import Trace

__all__ = ["ALL", "Report", "Waits", "percentile", "report"]

ALL = "all"
"""In place of a class: everybody."""
_SHORTEST_SERVICE_S = 0.001
"""Keeps the slowdown of a request that took no time finite."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long those waited who were served, from arrival to engine, loading included."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """Who suffered for whom."""

    jain: float
    """Jain's index over the models' mean slowdown: 1 when all suffer alike, 1/n when one suffers alone."""
    most_overtaken: int
    """Times that a request was passed by later, not more important ones on those who then had to go for its load."""
    longest_overtaken_s: float
    """Seconds from the first such passing to its turn, of whom that took longest."""
    beyond_bound_s: float
    """By how much that exceeds `max_overtaken_s`; 0 when it does not. What was in flight has to finish."""


@dataclass(frozen=True, slots=True)
class Use:
    """What became of the devices' memory over time, as shares of all of it over the whole run."""

    held: float
    """Held by a model."""
    busy: float
    """Held by a model that had work."""
    engine_s: float
    """Seconds in which slots had work, added up."""


@dataclass(frozen=True, slots=True)
class Report:
    """One policy, one trace."""

    policy: str
    requests: int
    served: int
    left: int
    """Their callers gave up."""
    refused: Mapping[str, int]
    """By code of the error, the most frequent first."""
    waits: Mapping[str, Waits]
    """By class, the most important first; `ALL` last."""
    loads: int
    swaps: int
    """Loads for which somebody had to go."""
    cancelled: int
    """Loads that came to nothing."""
    makespan_s: float
    """From the first request to the last answer."""
    use: Use
    fairness: Fairness
    slowdown: Mapping[str, float]
    """By model, the mean of (waiting + service) / service."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def report(policy: str, trace: Trace, journal: Journal) -> Report:
    """The figures of a closed journal."""
    turns = list(journal.turns.values())
    served = [turn for turn in turns if turn.end is End.SERVED]
    slowdown = _slowdown(served)
    makespan_s = _makespan_s(turns)
    return Report(
        policy=policy,
        requests=len(turns),
        served=len(served),
        left=sum(turn.end is End.LEFT for turn in turns),
        refused=_refused(turns),
        waits=_waits(served),
        loads=len(journal.loads),
        swaps=sum(bool(load.victims) for load in journal.loads),
        cancelled=sum(load.ready_s is None for load in journal.loads),
        makespan_s=makespan_s,
        use=_use(trace, journal, makespan_s),
        fairness=_fairness(turns, slowdown, trace.limits.max_overtaken_s),
        slowdown=slowdown,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so much of the sorted values do not exceed; 0 of none."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def _waits(served: Iterable[Turn]) -> dict[str, Waits]:
    by_class: dict[int, list[float]] = {}
    everybody: list[float] = []
    for turn in served:
        if turn.waited_s is not None:
            by_class.setdefault(turn.ticket.priority, []).append(turn.waited_s)
            everybody.append(turn.waited_s)
    named = {name_of(priority): _waits_of(waits) for priority, waits in sorted(by_class.items())}
    return {**named, ALL: _waits_of(everybody)}


def _waits_of(waits: list[float]) -> Waits:
    waits.sort()
    p50_s, p95_s, p99_s = (percentile(waits, share) for share in (0.5, 0.95, 0.99))
    return Waits(len(waits), sum(waits) / max(1, len(waits)), p50_s, p95_s, p99_s, waits[-1] if waits else 0.0)


def _refused(turns: Iterable[Turn]) -> dict[str, int]:
    refused: dict[str, int] = {}
    for turn in turns:
        if turn.error is not None:
            refused[turn.error] = refused.get(turn.error, 0) + 1
    return dict(sorted(refused.items(), key=lambda one: (-one[1], one[0])))


def _slowdown(served: Iterable[Turn]) -> dict[str, float]:
    sums: dict[str, tuple[float, int]] = {}
    for turn in served:
        if turn.granted_s is None or turn.done_s is None:
            continue
        service_s = max(_SHORTEST_SERVICE_S, turn.done_s - turn.granted_s)
        total, count = sums.get(turn.ticket.model_id, (0.0, 0))
        slowdown = 1.0 + (turn.granted_s - turn.ticket.submitted_at_s) / service_s
        sums[turn.ticket.model_id] = (total + slowdown, count + 1)
    return {model: total / count for model, (total, count) in sorted(sums.items())}


def _makespan_s(turns: Sequence[Turn]) -> float:
    ends = [turn.done_s for turn in turns if turn.done_s is not None]
    return max(ends) - turns[0].ticket.submitted_at_s if ends else 0.0


def _use(trace: Trace, journal: Journal, makespan_s: float) -> Use:
    devices = {device.id: device.capacity_bytes - device.others_bytes for device in usable(trace.devices)}
    available = max(1.0, makespan_s * sum(devices.values()))
    held = busy = engine_s = 0.0
    for load in journal.loads:
        size = sum(share for device, share in load.shares.items() if device in devices)
        if load.held_from_s is not None and load.gone_s is not None:
            held += size * (load.gone_s - load.held_from_s)
        busy += size * load.busy_s
        engine_s += load.busy_s
    return Use(held / available, busy / available, engine_s)


def _fairness(turns: Iterable[Turn], slowdown: Mapping[str, float], bound_s: float) -> Fairness:
    overtaken = [turn for turn in turns if turn.overtaken]
    longest_s = max((turn.overtaken_s for turn in overtaken), default=0.0)
    return Fairness(
        jain=_jain(list(slowdown.values())),
        most_overtaken=max((turn.overtaken for turn in overtaken), default=0),
        longest_overtaken_s=longest_s,
        beyond_bound_s=max(0.0, longest_s - bound_s),
    )


def _jain(values: Sequence[float]) -> float:
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
