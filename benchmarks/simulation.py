"""`python -m benchmarks.simulation`: how long the simulator takes for a large fleet, and how much memory.

100 nodes of 8 GPUs, 100,000 requests for 2,400 models, half as many again as fit. The figures are compared
with their bars; the exit code is 1 when one is missed. Results go to `benchmarks/out/`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.figures import Figure, print_table
from inference.simulation.devices import parse_devices
from inference.simulation.policies import OURS, POLICIES
from inference.simulation.replay import replay
from inference.simulation.synthetic import generate, parse_spec

OUT = Path(__file__).resolve().parent / "out"
DEVICES = "100x8x80GiB"
WORDS = (
    "models=2400 size=10GiB..70GiB load=5s..30s parallel=4..8 service=1s..8s rate=20/s zipf=0.8 "
    "classes=normal:8,high:1,batch:3 clients=500 seed=1"
)
REQUESTS = 100_000
MOST_S = 600.0
MOST_GIB = 2.0


def main() -> int:
    """Parse arguments, measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m benchmarks.simulation --requests 5000 --profile",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="fewer: a look, not a figure")
    parser.add_argument("--policy", choices=list(POLICIES), default=OURS)
    parser.add_argument("--profile", action="store_true", help="print where the time goes (which then takes longer)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    arguments = parser.parse_args()
    trace = generate(parse_spec(f"{WORDS} requests={arguments.requests}"), parse_devices(DEVICES))
    profile = cProfile.Profile(builtins=False)
    if arguments.profile:
        profile.enable()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    report = replay(trace, arguments.policy, progress=_Told(arguments.requests, quiet=arguments.json)).report
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    profile.disable()
    figures = [
        Figure(f"{arguments.requests} requests on {DEVICES}", took_s, None, "s", MOST_S, "at most 10 minutes"),
        Figure("peak memory", peak_gib(), None, "GiB", MOST_GIB, "at most 2 GiB"),
    ]
    document = {
        "figures": [asdict(figure) | {"held": figure.held} for figure in figures],
        "words": WORDS,
        "processor_s": took_cpu_s,
        "report": report.as_json(),
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "simulation.json").write_text(json.dumps(document, indent=1))
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print(f"  {report.served} served, {report.loads} loads, {report.swaps} swaps in {report.makespan_s:.0f} s")
        print(f"  {took_cpu_s:.0f} s of the processor, of {took_s:.0f} s altogether")
        print_table(figures, "The simulator on a large fleet")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0 if all(figure.held for figure in figures) else 1


def peak_gib() -> float:
    """The most memory this process ever had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / (1 << 30)


class _Told:
    """A line per tenth of the way."""

    def __init__(self, requests: int, *, quiet: bool) -> None:
        self._step = max(1, requests // 10)
        self._next = 0 if not quiet else sys.maxsize

    def __call__(self, count: int) -> None:
        if count >= self._next:
            self._next = count + self._step
            print(f"  {count} requests have come", flush=True)


if __name__ == "__main__":
    sys.exit(main())
