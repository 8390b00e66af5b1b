"""Get a Redis 7 for the tests without installing anything: `python scripts/fetch_redis.py` prints where it is.

Takes the one on PATH, or unpacks the distribution's packages (`apt-get download`, `dpkg -x`, no root) into
`~/.cache/model-boss/test-servers`. Run by `make test`, and by `tests/contract/stores.py` through `find_or_fetch`.
Cheap when done before. Where there is neither, it says so and the tests that need Redis are skipped: exit code 0 all
the same, for nothing else depends on it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["Unobtainable", "cache_dir", "fetch", "find_or_fetch", "on_path"]

_OLDEST_MAJOR = 7
_PACKAGES = ("redis-server", "redis-tools")
_APT_S = 120.0


class Unobtainable(Exception):
    """There is no Redis 7 here and no way to get one; the message says why."""


@functools.cache
def find_or_fetch() -> Path:
    """A redis-server program, version 7 or newer. Raises Unobtainable."""
    return on_path() or fetch()


def on_path() -> Path | None:
    """The one that is installed, where it is new enough."""
    found = shutil.which("redis-server")
    return Path(found) if found is not None and _is_new_enough(Path(found)) else None


def cache_dir() -> Path:
    """Where unpacked servers are kept; follows XDG_CACHE_HOME."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if named and Path(named).is_absolute() else Path.home() / ".cache"
    return base / "model-boss" / "test-servers"


def fetch() -> Path:
    """The unpacked one, unpacked now if need be. Raises Unobtainable."""
    program = cache_dir() / "redis" / "bin" / "redis-server"
    if _is_new_enough(program):
        return program
    for tool in ("apt-get", "apt-cache", "dpkg", "dpkg-query"):
        if shutil.which(tool) is None:
            raise Unobtainable(f"no redis-server >= {_OLDEST_MAJOR} on PATH, and no {tool} to get one with")
    cache_dir().mkdir(parents=True, exist_ok=True)
    # Made whole beside its place, then moved there: an interrupted run leaves nothing that looks finished.
    draft = Path(tempfile.mkdtemp(prefix="redis-", dir=cache_dir()))
    try:
        _unpack_into(draft, final=program.parents[1])
        shutil.rmtree(program.parents[1], ignore_errors=True)
        draft.rename(program.parents[1])
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if not _is_new_enough(program):
        raise Unobtainable(f"the distribution's redis-server is older than {_OLDEST_MAJOR}, or does not run")
    return program


def _unpack_into(draft: Path, *, final: Path) -> None:
    packages = draft / "packages"
    packages.mkdir()
    # apt reads the packages as a user of its own where it runs as root.
    for directory in (draft, packages):
        directory.chmod(0o755)
    wanted, got = list(_PACKAGES), set[str]()
    while wanted:
        name = wanted.pop()
        if name in got:
            continue
        got.add(name)
        _run(["apt-get", "download", name], cwd=packages)
        wanted += [library for library in _libraries(name) if not _is_installed(library)]
    for package in packages.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(draft / "root")], cwd=draft)
    shutil.rmtree(packages)
    libraries = ":".join(str(final / "root" / found.relative_to(draft / "root")) for found in _library_dirs(draft))
    program = draft / "bin" / "redis-server"
    program.parent.mkdir()
    # A script, since whoever starts a server by its name knows nothing of these libraries.
    real = final / "root" / "usr" / "bin" / "redis-server"
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{real}" "$@"\n')
    program.chmod(0o755)


def _libraries(package: str) -> list[str]:
    told = _run(["apt-cache", "depends", "--important", package], cwd=Path("/")).splitlines()
    names = [line.split()[-1] for line in told if line.strip().startswith("Depends:")]
    return [name for name in names if name.startswith(("lib", "lua")) and name != "libc6"]


def _is_installed(package: str) -> bool:
    told = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout == "installed"


def _library_dirs(draft: Path) -> list[Path]:
    return sorted({found.parent for found in (draft / "root").rglob("*.so*")})


def _is_new_enough(program: Path) -> bool:
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    number = told.partition("v=")[2].partition(".")[0]
    return number.isdigit() and int(number) >= _OLDEST_MAJOR


def _run(command: list[str], *, cwd: Path) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_APT_S, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no reason given"]
        raise Unobtainable(f"`{' '.join(command)}`: {lines[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unobtainable(f"`{' '.join(command)}`: {error}") from error
    return done.stdout


def main() -> int:
    """Print where it is, or why there is none."""
    try:
        print(find_or_fetch())
    except Unobtainable as error:
        print(f"no Redis for the tests, those that need it are skipped: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
