"""What a llama-server says about its version, and whether that is new enough.

Two forms are in use: `version: 6869 (abcdef12)` (a build number), and since August 2026
`version: 0.5.0-dev (build 1, commit 0c1e570)`, where the build number means nothing in builds from an archive.
Called by `resolve.py` for programs somebody else built, and by `build.py` for the one just built.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIN_BUILD = 8000
"""Oldest accepted build number (early 2026): unix sockets, `--fit off`, `/v1/messages` and `/slots` are all in it."""

_PATTERN = re.compile(
    r"^version:\s*(?:(?P<release>\d+\.\d+\.\d+\S*)(?:\s+\(build (?P<count>\d+))?|(?P<build>\d+)\b)", re.MULTILINE
)
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Version:
    """A llama-server's version."""

    release: str | None
    """`0.5.0-dev`; None for programs older than August 2026."""
    build: int | None
    """The upstream build number, where one was stated."""

    def __str__(self) -> str:
        return self.release if self.release is not None else f"b{self.build}"

    @property
    def problem(self) -> str | None:
        """Why this version is not used; None when it is new enough. Every version with a release is."""
        if self.release is not None or (self.build is not None and self.build >= MIN_BUILD):
            return None
        if not self.build:
            return f"does not state its build number; b{MIN_BUILD} or newer is needed"
        return f"build b{self.build} is too old; b{MIN_BUILD} or newer is needed"


def parse_version(text: str) -> Version | None:
    """Read the output of `llama-server --version`; None when it holds no version."""
    found = _PATTERN.search(text)
    if found is None:
        return None
    build = found["build"] or found["count"]
    return Version(found["release"], int(build) if build else None)


def read_version(program: Path) -> Version | str:
    """Ask the program for its version; a str is the reason why that failed."""
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    output = done.stdout + done.stderr
    version = parse_version(output)
    if version is not None:
        return version
    last = output.strip().splitlines()[-1:] or ["no output"]
    return f"`--version` (exit {done.returncode}) shows no version: {last[0][:200]}"
