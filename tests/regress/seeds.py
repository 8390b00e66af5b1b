"""Faults that histories once found, each with a seed that shows it as long as its remedy is taken away.

Replayed by `test_seeds.py`. A seed means something only as long as the world takes the same steps from it: where it
shows its fault no more, `python -m tests.regress.seeds` looks for others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults.history import BrokenHistory, play
from tests.faults.server import running_server
from tests.faults.store import ScriptServer

__all__ = ["REGRESSIONS", "Regression"]

_MOST = 3000


@dataclass(frozen=True, slots=True)
class Regression:
    """One fault that was found and mended."""

    seed: int
    sentence: str
    """What went wrong."""
    red: str
    """What the checker says (a regular expression)."""
    without: Mapping[str, str]
    """Text of the scripts, and what replaces it: takes the remedy away."""


REGRESSIONS = (
    Regression(
        22,
        "A keeper saw a lease ending; its asker revived it and began, and then the keeper's word freed what lives.",
        r"by a command that does not mean it",
        {"(not dead.state or dead.state == lease.state)": "true"},
    ),
    Regression(
        459,
        "After a wipe with a clock that went back, waiters came again with their places, and later ones went before.",
        r"arrived last and got place",
        {"meta.order = math.max(meta.order, order)": "if not args.order then meta.order = order end"},
    ),
    Regression(
        183,
        "A node never heard of an epoch, for the reply was lost; after a wipe and a clock that went back that epoch "
        "began once more, and its fences were given a second time.",
        r"fence .* was given to",
        {"meta.seq = tonumber(string.sub(redis.sha1hex(args.run_id), 1, 7), 16)": "meta.seq = 0"},
    ),
    Regression(
        1472,
        "A holder that used more than it claimed raised its claim above what there is, for nothing more was counted.",
        r"now claims",
        {"math.max(0, more) > free": "more > math.max(0, free)"},
    ),
    Regression(
        60,
        "Rows that were read before a holder grew put its old shares back, and the difference was granted to another.",
        r"has fence .* the store says|free is|was granted .* and free was",
        {"return lease.resized_in == whole(meta.epoch) and": "return false and"},
    ),
    Regression(
        165,
        "A waiter's resize came twice; the first had it granted, and the second was called stale.",
        r"the repeated .* was answered",
        {"local is_repeated = not args.epoch and": "local is_repeated = false and"},
    ),
    Regression(
        1,
        "A holder began and ended between two readings of a GPU; its room was granted before the driver had shown it.",
        r"free is|room that its node does not have|and free was",
        {"if device.settles then changes.settles = '1' end": ""},
    ),
)


def find(server: ScriptServer, regression: Regression) -> int | None:
    """The first seed that shows it."""
    for seed in range(_MOST):
        try:
            play(server, seed)
        except BrokenHistory as broken:
            if re.search(regression.red, broken.reason):
                return seed
    return None


def main() -> None:
    """Print a seed for each."""
    with running_server() as path:
        for regression in REGRESSIONS:
            with ScriptServer(path, regression.without) as server:
                print(find(server, regression), regression.sentence, flush=True)


if __name__ == "__main__":
    main()
