"""The schedulers that can be simulated, by the name people call them.

Called by `replay.py` and `coordinator/cli/simulate.py`; calls `scheduler.py` and `peers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from inference.scheduler import Scheduler
from inference.simulation.peers import Fifo, LruCount, ShortestKeepAlive
from inference.simulation.trace import Trace
from inference.simulation.world import Decides

__all__ = ["OURS", "POLICIES"]

OURS = "ours"


class _Make(Protocol):
    def __call__(self, trace: Trace, *, models_max: int | None) -> Decides:
        """A scheduler that knows nothing yet; `models_max` is how many models `lru-count` may have loaded."""


def _ours(trace: Trace, *, models_max: int | None) -> Decides:  # noqa: ARG001 - only one policy counts models
    return Scheduler(trace.limits)


def _fifo(trace: Trace, *, models_max: int | None) -> Decides:  # noqa: ARG001 - only one policy counts models
    return Fifo(trace.limits)


def _lru_count(trace: Trace, *, models_max: int | None) -> Decides:
    return LruCount(trace.limits, models_max)


def _shortest_keepalive(trace: Trace, *, models_max: int | None) -> Decides:  # noqa: ARG001 - only one policy counts models
    return ShortestKeepAlive(trace.limits)


POLICIES: Mapping[str, _Make] = {
    OURS: _ours,
    "fifo": _fifo,
    "lru-count": _lru_count,
    "shortest-keepalive": _shortest_keepalive,
}
