"""One policy over one trace, from its first request to the last answer.

Called by `coordinator/cli/simulate.py`, the benchmark and tests; calls `world.py`, `policies.py`, `journal.py`,
`report.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inference.simulation.journal import Journal
from inference.simulation.policies import OURS, POLICIES
from inference.simulation.report import Report, report
from inference.simulation.trace import Trace
from inference.simulation.world import STOP_S, TICK_S, Times, World

__all__ = ["Outcome", "replay"]

_SHORTEST_TICK_S = 0.1
"""As often as a broker looks while somebody waits."""
_TICKS_PER_LOAD = 10
_TOLD_EVERY = 256
"""Requests between two words about how far it is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of a trace."""

    report: Report
    journal: Journal


def replay(
    trace: Trace,
    policy: str = OURS,
    *,
    models_max: int | None = None,
    stop_s: float = STOP_S,
    tick_s: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Let the policy (a key of `POLICIES`) meet the trace.

    `stop_s` is how long a stopped model's memory takes to come back; `progress` is told how many requests have come.
    """
    journal = Journal()
    world = World(
        POLICIES[policy](trace, models_max=models_max),
        devices=trace.devices,
        models={model.id: model.as_model() for model in trace.models},
        times=Times(load_s=trace.load_s, service_s=trace.service_s, stop_s=stop_s),
        requests=trace.requests,
        tick_s=_tick_s(trace) if tick_s is None else tick_s,
        watcher=journal,
    )
    world.begin()
    while world.step():
        if progress is not None and not len(journal.turns) % _TOLD_EVERY:
            progress(len(journal.turns))
    journal.close()
    return Outcome(report(policy, trace, journal), journal)


def _tick_s(trace: Trace) -> float:
    """Fine enough to be small beside the shortest load."""
    shortest = min(trace.load_s.values(), default=TICK_S)
    return min(TICK_S, max(_SHORTEST_TICK_S, shortest / _TICKS_PER_LOAD))
