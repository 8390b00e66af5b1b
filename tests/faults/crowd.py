"""Many processes with many tasks each, real connections, and a network that cuts them: nothing may be given twice.

Called by `test_crowd.py` and `python -m tests.faults`; starts `tests.faults.proxy` and `tests.faults.crowd_worker`,
and has `tests.faults.crowd_checker` read what these wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.crowd_checker import check_crowd
from tests.faults.server import running_server
from tests.support import wait_until

__all__ = ["CrowdOutcome", "run_crowd"]

_ROOT = Path(__file__).resolve().parents[2]
_DEVICES = {f"n0/gpu{index}": 100 for index in range(24)}
_OPERATIONS = ("acquire", "look", "cancel", "activate", "renew", "release", "tick")
_START_S = 2.0
"""How long processes may take to start before their time counts."""
_PATIENCE_S = 60.0
"""How long they may take to end after it."""


@dataclass(frozen=True, slots=True)
class CrowdOutcome:
    """What became of it."""

    operations: int
    counts: Counter[str]
    network: str
    """What the proxy did."""
    faults: list[str]

    def __str__(self) -> str:
        return f"{self.operations:,} operations, {len(self.faults)} violations; network: {self.network}"


def run_crowd(directory: Path, *, seconds: float, processes: int = 8, tasks: int = 50) -> CrowdOutcome:
    """Let it happen, with all files in this directory."""
    listen = directory / "proxy.sock"
    started: list[subprocess.Popen[str]] = []
    with running_server() as server:
        try:
            proxy = _start(started, "proxy", str(listen), str(server), "1")
            wait_until(listen.exists, "the proxy's socket")
            end_s = time.monotonic() + _START_S + seconds
            workers = []
            for number in range(processes + 1):
                order = {
                    "url": f"unix://{listen}",
                    "seed": number,
                    "tasks": tasks,
                    "keeper": number == 0,
                    "listens": number % 4 == 1,  # the others find out by looking: the stream tells all of everybody
                    "devices": _DEVICES,
                    "end_s": end_s,
                    "trace": str(directory / f"trace-{number}.jsonl"),
                }
                workers.append(_start(started, "crowd_worker", json.dumps(order)))
            for worker in workers:
                assert worker.wait(_START_S + seconds + _PATIENCE_S) == 0, "a process of the crowd failed"
            proxy.terminate()
            network, _ = proxy.communicate(timeout=_PATIENCE_S)
        finally:
            for process in started:
                process.kill()
                process.wait()
    counts, faults = check_crowd(_records(directory, processes + 1), _DEVICES)
    return CrowdOutcome(sum(counts[op] for op in _OPERATIONS), counts, network.strip(), faults)


def _start(started: list[subprocess.Popen[str]], module: str, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", f"tests.faults.{module}", *arguments]
    output = subprocess.PIPE if module == "proxy" else None
    started.append(subprocess.Popen(words, cwd=_ROOT, stdout=output, text=True))
    return started[-1]


def _records(directory: Path, files: int) -> Iterator[dict[str, Any]]:
    for number in range(files):
        with (directory / f"trace-{number}.jsonl").open(encoding="utf-8") as trace:
            yield from map(json.loads, trace)
