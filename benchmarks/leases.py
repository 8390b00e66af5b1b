"""`python -m benchmarks.leases`: what a lease costs, beside a bare script call and beside reslock, and how that grows.

Each figure is compared with its bar; the exit code is 1 when a bar is missed. Results go to `benchmarks/out/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks import lease_plot
from benchmarks.figures import Figure, print_table
from benchmarks.lease_store import Bench, private_server
from benchmarks.pairs import pairs_per_second

OUT = Path(__file__).resolve().parent / "out"
WAITERS = (10, 30, 100, 300, 1000, 3000)
DEVICES = (1, 8, 64)
Growth = dict[str, dict[str, list[float]]]
"""Operation -> number of devices -> median seconds for each of `WAITERS`."""


def main() -> int:
    """Parse arguments, measure, print, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks.leases\n  python -m benchmarks.leases --quick --json",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds: a look, not a figure")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    arguments = parser.parse_args()
    report = (lambda _line: None) if arguments.json else (lambda line: print(f"  {line}", flush=True))
    figures, samples, growth = run(rounds=5 if arguments.quick else 20, report=report)
    OUT.mkdir(exist_ok=True)
    document = {
        "figures": [asdict(figure) | {"held": figure.held} for figure in figures],
        "samples": samples,
        "growth": growth,
        "waiters": WAITERS,
    }
    (OUT / "leases.json").write_text(json.dumps(document, indent=1))
    lease_plot.draw(samples, growth, WAITERS, OUT / "leases.png")
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(figures, "Leases: store, library, growth; same run")
    return 0 if all(figure.held for figure in figures) else 1


def run(*, rounds: int, report: Callable[[str], None]) -> tuple[list[Figure], dict[str, list[float]], Growth]:
    """Measure everything: figures, raw samples, growth."""
    with tempfile.TemporaryDirectory(prefix="mb-bench-", dir="/tmp") as name:
        samples = pairs_per_second(Path(name), rounds=rounds, report=report)
        with private_server(Path(name)) as server:
            store = Bench(server)
            store.sync(devices=2)
            bare, pair = store.bare_and_pair(rounds * 50)
            report(f"bare EVALSHA {bare * 1e6:.0f} us, acquire and release {pair * 1e6:.0f} us, at p50")
            growth: Growth = {"tick": {}, "acquire": {}, "node_sync": {}}
            for devices in DEVICES:
                for waiters in WAITERS:
                    store = Bench(server)
                    store.sync(devices=devices)
                    store.fill(waiters)
                    for operation, seconds in store.under_load(rounds).items():
                        growth[operation].setdefault(str(devices), []).append(seconds)
                    store.forget()
                report(f"{devices} devices: {', '.join(_line(growth, name, devices) for name in growth)}")
    tick = growth["tick"]["64"][WAITERS.index(1000)]
    ours, peer = statistics.median(samples["hold()"]), statistics.median(samples["reslock"])
    return (
        [
            Figure("acquire + release in the store, p50", pair * 1e6, bare * 1e6, "us", 5 * bare * 1e6,
                   "at most 5 bare EVALSHA"),
            Figure("hold() pairs", ours, peer, "/s", 2 * peer, "at least 2 x reslock", higher_is_better=True),
            Figure("tick, 1,000 waiters, 64 devices", tick * 1e3, None, "ms", 5.0, "at most 5 ms"),
        ],
        samples,
        growth,
    )  # fmt: skip


def _line(growth: Growth, operation: str, devices: int) -> str:
    values = growth[operation][str(devices)]
    return f"{operation} {values[0] * 1e3:.2f} to {values[-1] * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
