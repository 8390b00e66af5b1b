"""What a build reports while it runs, and how cmake, pip and ninja are run so that they can be watched and ended.

Called by `build.py`, `source.py` and `toolchain.py`; read by `coordinator/cli/engines.py`, which draws the bar.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Stage(StrEnum):
    """Where a build is."""

    WAIT = "waiting"
    """Another build holds the lock."""
    TOOLS = "tools"
    """Fetching cmake and ninja."""
    DOWNLOAD = "download"
    """Fetching the source; done and total are bytes."""
    UNPACK = "unpack"
    """Unpacking it."""
    CONFIGURE = "configure"
    """cmake looks at the machine."""
    COMPILE = "compile"
    """done and total are steps of ninja."""
    INSTALL = "install"
    """Checking the programs and moving them into the cache."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One report."""

    stage: Stage
    text: str
    """For people."""
    done: int = 0
    total: int = 0
    """0 while unknown."""


Report = Callable[[Progress], None]

_GUILTY = re.compile(r"error\b|fatal|No space left|Killed|undefined reference", re.IGNORECASE)
_NINJA = re.compile(r"^\[(\d+)/(\d+)\] (.*)")


def parse_ninja(line: str) -> tuple[int, int, str] | None:
    """Read `[12/209] Building CXX object x.o` as (12, 209, text); None for every other line."""
    found = _NINJA.match(line)
    return (int(found[1]), int(found[2]), found[3]) if found else None


def run_logged(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str],
    *,
    keep_open: Sequence[int] = (),
    on_line: Callable[[str], None] | None = None,
) -> int:
    """Run a command with its output appended to `log` and given to `on_line`; return its exit status.

    The command gets a process group of its own, which is ended when this function is left in any other way (Ctrl-C).
    It inherits `keep_open`, the build lock: should this process be killed outright, then whoever comes next waits for
    the orphaned compilers instead of building in the same directory beside them.
    """
    with log.open("a") as out:
        out.write(f"\n$ {' '.join(map(str, command))}\n")
        out.flush()
        child = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(environment),
            start_new_session=True,
            pass_fds=keep_open,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                out.write(line)
                out.flush()
                if on_line is not None:
                    on_line(line.rstrip("\n"))
            return child.wait()
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.stdout is not None:
        child.stdout.close()


def telling_lines(log: Path, count: int = 6) -> str:
    """Return the lines of a log that say what went wrong, or its last ones."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    guilty: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("CMake Error"):  # it names the place, and the next lines say what
            guilty += lines[number : number + 3]
        elif _GUILTY.search(line):
            guilty.append(line)
    return "\n".join(f"  {line[:300]}" for line in (guilty or lines)[-count:])
