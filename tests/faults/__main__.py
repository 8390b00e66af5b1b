"""`make faults`: the ledger's promises under everything that can go wrong.

python -m tests.faults                     everything: histories, storms, fairness, a crowd of processes
python -m tests.faults --histories 500     so many histories, and nothing else; likewise --storms
python -m tests.faults --seed 4711         one history, with its whole trace (--json: as the checker reads it)
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.books import Violation
from tests.faults.campaign import MUST_HAPPEN, Outcome, run_many
from tests.faults.crowd import run_crowd
from tests.faults.fairness import serve_all
from tests.faults.history import BrokenHistory, play
from tests.faults.reading import readable
from tests.faults.server import running_server
from tests.faults.store import ScriptServer

_HISTORIES = 10_000
_STORMS = 1000
_CROWD_S = 60.0
_LEAST_OPERATIONS = 100_000
_WORKERS = 2
_ENOUGH = 1000
"""So many histories must have seen everything that can happen."""
_TELL_EVERY_S = 5.0
_TITLES = {"history": "histories of 80 steps", "storm": "pre-emption storms"}


def main() -> int:
    """Exit code 0 when no promise was broken."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, help="replay one history and print its trace")
    parser.add_argument("--json", action="store_true", help="with --seed: the trace as JSON lines")
    parser.add_argument("--histories", type=int, help=f"histories alone, so many (of everything: {_HISTORIES:,})")
    parser.add_argument("--storms", type=int, help=f"storms alone, so many (of everything: {_STORMS:,})")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="processes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended
    if options.seed is not None:
        return _replay(options.seed, as_json=options.json)
    began_s = time.monotonic()
    alone = {"history": options.histories, "storm": options.storms}
    if any(alone.values()):
        return (
            0 if all(_many(sort, options.first, size, options.workers) for sort, size in alone.items() if size) else 1
        )
    parts = (
        lambda: _many("history", options.first, _HISTORIES, options.workers),
        lambda: _many("storm", options.first, _STORMS, options.workers),
        _fairness,
        _crowd,
    )
    well = [part() for part in parts]
    print(f"all of it in {time.monotonic() - began_s:.0f} s: {'no promise was broken' if all(well) else 'BROKEN'}")
    return 0 if all(well) else 1


def _replay(seed: int, *, as_json: bool) -> int:
    def keep(record: dict[str, Any]) -> None:
        print(json.dumps(record) if as_json else readable(record))

    with running_server() as path, ScriptServer(path) as server:
        try:
            play(server, seed, keep=keep)
        except BrokenHistory as broken:
            print(broken, file=sys.stderr)
            return 1
    print(f"history {seed}: no promise was broken", file=sys.stderr)
    return 0


def _many(sort: str, first: int, count: int, workers: int) -> bool:
    last_s = time.monotonic()

    def tell(outcome: Outcome) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _TELL_EVERY_S:
            last_s = time.monotonic()
            print(f"  {outcome}", flush=True)

    print(f"{_TITLES[sort]}: {count:,}, seeds from {first}, {workers} processes", flush=True)
    outcome = run_many(sort, range(first, first + count), workers=workers, tell=tell)
    print("  " + ", ".join(f"{size:,} {what}" for what, size in sorted(outcome.counts.items())))
    never = [what for what in MUST_HAPPEN[sort] if not outcome.counts[what]] if count >= _ENOUGH else []
    if never:
        print(f"  never happened, so nothing is known about it: {', '.join(never)}")
    for broken in outcome.broken:
        print(f"  {broken}")
        if sort == "history":
            print(f'    make faults ARGS="--seed {broken.seed}"')
    print(outcome, flush=True)
    return not outcome.broken and not never


def _fairness() -> bool:
    well = True
    with running_server() as path, ScriptServer(path) as server:
        for yielding in (False, True):
            print(
                f"1,000 waiters in 3 classes, gangs of any devices{', half of them pre-emptible' * yielding}",
                flush=True,
            )
            try:
                counts = serve_all(server, 1, yielding=yielding)
                granted, notices = counts["granted"], counts.get("notice", 0)
                print(f"  {granted:,} grants, {notices} notices, 0 overtakings that are not allowed")
            except Violation as violation:
                print(f"  {violation}")
                well = False
    return well


def _crowd() -> bool:
    print(f"8 processes of 50 tasks for {_CROWD_S:.0f} s through a faulty network", flush=True)
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as directory:
        outcome = run_crowd(Path(directory), seconds=_CROWD_S)
    print(f"  {outcome}")
    for fault in outcome.faults[:5]:
        print(f"  {fault}")
    if outcome.operations < _LEAST_OPERATIONS:
        print(f"  fewer than {_LEAST_OPERATIONS:,} operations: too few to say anything")
    return not outcome.faults and outcome.operations >= _LEAST_OPERATIONS


if __name__ == "__main__":
    sys.exit(main())
