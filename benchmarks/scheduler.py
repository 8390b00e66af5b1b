"""`python -m benchmarks.scheduler`: how long one scheduling decision takes, and how that grows with the queue.

10,000 waiting tickets, 100 models, 64 devices, all of them full (`scheduler_load.py`). A decision is one call of
`Scheduler.handle`; it is computation alone, so what it takes is measured in processor time, which says the same on a
busy machine. The garbage collector runs as it does in a broker, whose modules are loaded too. Pools of different sizes
take turns. Each figure is compared with its bar; the exit code is 1 when one is missed. Results: `benchmarks/out/`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import scheduler_plot
from benchmarks.figures import Figure, print_table
from benchmarks.scheduler_load import BusyPool, Decision

OUT = Path(__file__).resolve().parent / "out"
TICKETS, TENTH, MODELS = 10_000, 1_000, 100
CROWD = 300
"""So many models are shown too, most of which wait for room: there is no bar for that."""
SIZES = (100, TENTH, TICKETS, 100_000)
BLOCK = 1000
"""Decisions of one pool before it is the next one's turn."""
P50_MS, P99_MS, GROWTH = 1.0, 5.0, 1.2

Taken = Mapping[int, Sequence[Sequence[Decision]]]
"""By number of tickets, the decisions of each round."""
Report = Callable[[str], None]


def main() -> int:
    """Parse arguments, measure, print, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks.scheduler\n  python -m benchmarks.scheduler --quick --json",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no pool of 100,000 tickets")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    arguments = parser.parse_args()
    importlib.import_module("coordinator.server")  # what a broker has loaded is what the collector looks through
    report = (lambda _line: None) if arguments.json else (lambda line: print(f"  {line}", flush=True))
    rounds = 3 if arguments.quick else 8
    sizes = SIZES[:-1] if arguments.quick else SIZES
    taken = take_turns({size: settled(size, MODELS, report) for size in sizes}, rounds, report)
    crowd = take_turns({TICKETS: settled(TICKETS, CROWD, report)}, rounds, report)[TICKETS]
    figures = _figures(taken)
    growth = {size: _summary([one for block in blocks for one in block]) for size, blocks in taken.items()}
    kinds = {f"{MODELS} models": by_kind(taken[TICKETS]), f"{CROWD} models": by_kind(crowd)}
    document = {
        "figures": [asdict(figure) | {"held": figure.held} for figure in figures],
        "kinds": kinds,
        "growth": growth,
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "scheduler.json").write_text(json.dumps(document, indent=1))
    scheduler_plot.draw(growth, kinds, OUT / "scheduler.png")
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(figures, f"One decision: {TICKETS} tickets, {MODELS} models, 64 devices")
        _print_kinds(kinds)
    return 0 if all(figure.held for figure in figures) else 1


def settled(tickets: int, models: int, report: Report) -> BusyPool:
    """A pool of that size, ready to be measured."""
    pool = BusyPool(tickets, models=models)
    pool.settle()
    report(pool.described())
    return pool


def take_turns(pools: Mapping[int, BusyPool], rounds: int, report: Report) -> Taken:
    """The decisions of every pool, block by block."""
    taken: dict[int, list[list[Decision]]] = {size: [] for size in pools}
    for turn in range(rounds):
        for size, pool in pools.items():
            taken[size].append(pool.run(BLOCK))
        medians = ", ".join(f"{size}: {_median_ms(blocks[-1]):.2f} ms" for size, blocks in taken.items())
        report(f"round {turn + 1} of {rounds}, p50 by tickets: {medians}")
    return taken


def _figures(taken: Taken) -> list[Figure]:
    everything = _summary([one for block in taken[TICKETS] for one in block])
    pairs = zip(taken[TICKETS], taken[TENTH], strict=True)
    growth = statistics.median(_median_ms(many) / _median_ms(few) for many, few in pairs)
    few_ms = _summary([one for block in taken[TENTH] for one in block])["p50_ms"]
    return [
        Figure("decision, p50", everything["p50_ms"], None, "ms", P50_MS, f"at most {P50_MS:g} ms"),
        Figure("decision, p99", everything["p99_ms"], None, "ms", P99_MS, f"at most {P99_MS:g} ms"),
        Figure("ten times the tickets", growth, 1.0, "x", GROWTH, f"at most {GROWTH} x of {TENTH}'s {few_ms:.2f} ms"),
    ]


def by_kind(blocks: Sequence[Sequence[Decision]]) -> dict[str, dict[str, float]]:
    """The same figures for each kind of event."""
    kinds: dict[str, list[Decision]] = {}
    for block in blocks:
        for one in block:
            kinds.setdefault(one.kind, []).append(one)
    return {kind: _summary(decisions) for kind, decisions in sorted(kinds.items())}


def _summary(decisions: Sequence[Decision]) -> dict[str, float]:
    times = sorted(one.took_s * 1e3 for one in decisions)
    return {
        "count": len(times),
        "p50_ms": statistics.median(times),
        "p99_ms": times[int(len(times) * 0.99)],
        "mean_ms": statistics.fmean(times),
        "max_ms": times[-1],
        "collecting": sum(one.collecting_s for one in decisions) * 1e3 / sum(times),
    }


def _median_ms(block: Sequence[Decision]) -> float:
    return statistics.median(one.took_s for one in block) * 1e3


def _print_kinds(kinds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    for title, rows in kinds.items():
        table = Table("event", "decisions", "p50", "p99", "longest", "collecting garbage", title=title)
        for kind, row in rows.items():
            times = [f"{row[name]:.2f} ms" for name in ("p50_ms", "p99_ms", "max_ms")]
            table.add_row(kind, str(row["count"]), *times, f"{row['collecting']:.1%}")
        Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
