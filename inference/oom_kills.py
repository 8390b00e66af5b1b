"""How often the system has killed a process for want of memory: asked by `engine_run.py` before and after an engine's
life, for nothing else tells such a kill from any other SIGKILL.

Linux alone; elsewhere the count stays 0. Besides the machine's count there is one per control group (version 2 in
`memory.events`, version 1 in `memory.oom_control`): that of the broker's is the engine's too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["count"]

_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """A number that grows with every such kill in reach."""
    return sum(_read(path) for path in (proc / "vmstat", *_of_own_group(proc, groups)))


def _of_own_group(proc: Path, groups: Path) -> Iterator[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"


def _read(path: Path) -> int:
    try:
        found = _COUNTER.search(path.read_text())
    except OSError:
        return 0
    return int(found.group(1)) if found else 0
