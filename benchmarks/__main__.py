"""`python -m benchmarks`: run llama-server, its router mode and Model Boss side by side and print the ratios.

Each figure is compared with its bar; the exit code is 1 when a bar is missed. Results go to `benchmarks/out/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks import measures, plot, targets
from benchmarks.client import LoadClient, chat_request
from benchmarks.figures import Figure, print_table

MODELS = targets.DEMO.models
OUT = Path(__file__).resolve().parent / "out"


def main() -> int:
    """Parse arguments, measure, print, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m benchmarks\n  python -m benchmarks --quick --json",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds: a look, not a figure")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    arguments = parser.parse_args()
    report = (lambda _line: None) if arguments.json else (lambda line: print(f"  {line}", flush=True))
    figures, samples = run(rounds=4 if arguments.quick else 16, report=report)
    OUT.mkdir(exist_ok=True)
    document = {"figures": [asdict(figure) | {"held": figure.held} for figure in figures], "samples": samples}
    (OUT / "results.json").write_text(json.dumps(document, indent=1))
    plot.draw(samples, OUT / "results.png")
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(figures, "Model Boss beside llama-server, same run")
    return 0 if all(figure.held for figure in figures) else 1


def run(*, rounds: int, report: measures.Report) -> tuple[list[Figure], dict[str, measures.Samples]]:
    """Start the three servers, measure everything, return figures and raw samples."""
    binary = measures.default_binary()
    first = MODELS[0]
    with tempfile.TemporaryDirectory(prefix="mb-bench-", dir="/tmp") as name:
        directory = Path(name)
        with (
            targets.direct(binary, first, directory) as direct,
            targets.router(binary, directory) as router,
            targets.model_boss(binary, directory) as ours,
        ):
            idle = measures.resident_bytes(psutil.Process(ours.process.pid))
            everyone = [direct, router, ours]
            samples = {
                "latency": measures.latency(everyone, first, rounds=rounds, requests=200, report=report),
                "throughput": measures.throughput(
                    everyone, first, connections=4, rounds=rounds, seconds=2.0, report=report
                ),
                "swap": measures.swap([router, ours], MODELS, rounds=rounds * 2, report=report),
                "cold start": measures.cold_start(
                    lambda: _bare_start(binary, directory),
                    ours,
                    first,
                    lambda: _unload_all(ours.port),
                    rounds=rounds,
                    report=report,
                ),
            }
            return _figures(samples, ours, idle), samples


def _figures(samples: dict[str, measures.Samples], ours: targets.Target, idle_bytes: int) -> list[Figure]:
    mid = {kind: {name: measures.median(values, name) for name in values} for kind, values in samples.items()}
    direct_ms = mid["latency"]["direct"] * 1e3
    router_added = mid["latency"]["router"] * 1e3 - direct_ms
    swap_ms = mid["swap"]["router"] * 1e3
    bare_ms = mid["cold start"]["direct"] * 1e3
    rate = mid["throughput"]["router"]
    added = mid["latency"]["model-boss"] * 1e3 - direct_ms
    cold_ms = mid["cold start"]["model-boss"] * 1e3
    return [
        Figure("latency added at p50, 1 connection", added, router_added, "ms", 1.1 * router_added + 0.05,
               "at most 1.1 x router + 0.05 ms"),
        Figure("throughput, 4 connections", mid["throughput"]["model-boss"], rate, "req/s", 0.97 * rate,
               "at least 0.97 x router", higher_is_better=True),
        Figure("swap", mid["swap"]["model-boss"] * 1e3, swap_ms, "ms", 1.6 * swap_ms, "at most 1.6 x router"),
        Figure("cold start", cold_ms, bare_ms, "ms", bare_ms + 100, "at most bare llama-server + 100 ms"),
        Figure("idle memory of the broker", idle_bytes / 1e6, None, "MB", 120, "at most 120 MB"),
        Figure("serve to healthy", ours.health_s, None, "s", 2.0, "at most 2 s"),
    ]  # fmt: skip


def _bare_start(binary: Path, directory: Path) -> float:
    """Seconds from starting llama-server to the first byte of a one-token answer."""
    began = time.perf_counter()
    with targets.direct(binary, MODELS[0], directory) as target:
        client = LoadClient(target.port)
        client.post(chat_request(MODELS[0], max_tokens=1, stream=True))
        took = time.perf_counter() - began
        client.close()
    return took


def _unload_all(port: int) -> None:
    for model in MODELS:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/models/{model}/unload", b"{}")
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=30).close()


if __name__ == "__main__":
    sys.exit(main())
