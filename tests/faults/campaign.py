"""Fault histories and storms by the thousand, in several processes with a server each.

Called by `python -m tests.faults` and the tests; calls `tests.faults.history` and `tests.faults.storms`.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue

from tests.faults.history import BrokenHistory, play
from tests.faults.server import die_with_parent, running_server
from tests.faults.store import ScriptServer
from tests.faults.storms import weather_storm

__all__ = ["MUST_HAPPEN", "Outcome", "run_many"]

_REPORT_EVERY = 25
_LOOK_S = 2.0
"""How often workers that say nothing are looked after."""

MUST_HAPPEN = {
    "history": (
        *("granted", "queued", "started", "active", "ending", "revived", "freed", "cancelled", "refused", "stale"),
        *("notice", "withdrawn", "notice for another", "forced", "refused by the node", "resized in use", "noepoch"),
        *("wipe", "restart", "save", "roll_back", "jumped", "boot", "device", "foreign"),
        *("late", "lost", "reply lost", "twice"),
        *("node_sync", "acquire", "look", "resize", "cancel", "activate", "renew_many", "release", "confirm_dead"),
        *("preempt", "ack", "tick", "audit", "snapshot"),
    ),
    "storm": ("notice", "withdrawn", "notice for another", "forced", "freed"),
}
"""What so many of them must have seen; nothing is known about what never happens."""

_SORTS: dict[str, Callable[[ScriptServer, int], dict[str, int]]] = {"history": play, "storm": weather_storm}


@dataclass(slots=True)
class Outcome:
    """What became of a campaign."""

    histories: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """How often what happened."""
    broken: list[BrokenHistory] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.histories:,} in {self.seconds:.0f} s, {len(self.broken)} of them broken"


def run_many(
    sort: str,
    seeds: Sequence[int],
    *,
    workers: int,
    tell: Callable[[Outcome], None] = lambda _outcome: None,
    most_broken: int = 5,
) -> Outcome:
    """Play one for each seed, of this sort (`history`, `storm`), until so many are broken; `tell` it now and then."""
    outcome = Outcome()
    began_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    reports: Queue[tuple[int, Counter[str], list[BrokenHistory]]] = context.Queue()
    processes = [
        context.Process(target=_work, args=(sort, list(seeds[index::workers]), reports), daemon=True)
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        while outcome.histories < len(seeds) and len(outcome.broken) < most_broken:
            try:
                histories, counts, broken = reports.get(timeout=_LOOK_S)
            except queue.Empty:
                assert all(process.exitcode in (None, 0) for process in processes), "a worker failed"
                continue
            outcome.histories += histories
            outcome.counts.update(counts)
            outcome.broken += broken
            outcome.seconds = time.monotonic() - began_s
            tell(outcome)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return outcome


def _work(sort: str, seeds: Sequence[int], reports: Queue[tuple[int, Counter[str], list[BrokenHistory]]]) -> None:
    die_with_parent()
    with running_server() as path, ScriptServer(path) as server:
        for first in range(0, len(seeds), _REPORT_EVERY):
            some = seeds[first : first + _REPORT_EVERY]
            counts: Counter[str] = Counter()
            broken: list[BrokenHistory] = []
            for seed in some:
                try:
                    counts.update(_SORTS[sort](server, seed))
                except BrokenHistory as error:
                    broken.append(error)
            reports.put((len(some), counts, broken))
        reports.close()
        reports.join_thread()
