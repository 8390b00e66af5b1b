"""One fault history from its seed: the world acts, the checker sees.

Used by `tests.faults.campaign` and the tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.faults.checker import Checker, Violation
from tests.faults.server import ServerError
from tests.faults.store import ScriptServer, VirtualStore
from tests.faults.world import World

__all__ = ["STEPS", "BrokenHistory", "is_calm", "play"]

STEPS = 80
Json = dict[str, Any]


class BrokenHistory(AssertionError):
    """A promise was broken in the history of this seed."""

    def __init__(self, seed: int, records: int, reason: str) -> None:
        super().__init__(f"history {seed}, record {records}: {reason}")
        self.seed = seed
        self.records = records
        """How many records its trace had by then."""
        self.reason = reason

    def __reduce__(self) -> tuple[type[BrokenHistory], tuple[int, int, str]]:
        """It comes out of another process."""
        return type(self), (self.seed, self.records, self.reason)


def is_calm(seed: int) -> bool:
    """Every fourth history is without faults: there, the node's own books must never have to refuse anything."""
    return seed % 4 == 0


def play(
    server: ScriptServer,
    seed: int,
    *,
    steps: int = STEPS,
    guard: bool = True,
    keep: Callable[[Json], None] = lambda _record: None,
    judge: type[Checker] = Checker,
) -> dict[str, int]:
    """Play it; how often what happened. Raises BrokenHistory.

    `guard`: the nodes' own books; `keep` gets the trace; `judge`: who reads it.
    """
    checker = judge()
    records = 0

    def see(record: Json) -> None:
        nonlocal records
        records += 1
        keep(record)
        checker.see(record)

    try:
        World(VirtualStore(server), random.Random(seed), see, calm=is_calm(seed), guard=guard).run(steps)
    except Violation as violation:
        raise BrokenHistory(seed, records, str(violation)) from violation
    except ServerError as error:
        raise BrokenHistory(seed, records, f"a script failed: {error}") from error
    return checker.counts
