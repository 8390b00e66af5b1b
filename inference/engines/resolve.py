"""Which llama-server is used: the first usable one, in this order.

1. the path given by the caller (`engines.llama_server` in model-boss.yaml)
2. MODEL_BOSS_LLAMA_SERVER
3. PATH, if its version is new enough (`versions.MIN_BUILD`)
4. the per-user cache (`cache.py`), where `model-boss engines install llama-server` puts what it builds

What is named outright (1, 2) is taken at its word, whatever its version; if it is not there, that is an error and not a
reason to look elsewhere in silence. Called by the broker, the command line and the tests; standard library only.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference import errors
from inference.engines import cache
from inference.engines.recipe import VERSION
from inference.engines.versions import Version, read_version

VARIABLE = "MODEL_BOSS_LLAMA_SERVER"


class Origin(StrEnum):
    """Where a llama-server was looked for."""

    SETTING = "engines.llama_server"
    """The configuration names it."""
    ENVIRONMENT = VARIABLE
    """The environment names it."""
    PATH = "PATH"
    """Somebody installed one."""
    CACHE = "cache"
    """Built by `model-boss engines install llama-server`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place that was looked at."""

    origin: Origin
    path: Path | None
    """None: nothing there."""
    version: str | None
    """What the program says; None where it was not asked or has no answer."""
    accelerator: str | None
    """Known only for engines built by us."""
    problem: str | None
    """Why it is not used; None when it can be."""
    complaint: str | None = None
    """Why it will not work although it is used, for it was named outright; None when nothing is known against it."""

    @property
    def outright(self) -> bool:
        """Whether somebody named this very program; then it is taken at its word, and nothing else is looked for."""
        return self.origin in {Origin.SETTING, Origin.ENVIRONMENT}


def find_llama_server(explicit: Path | str | None = None) -> Path | None:
    """Return the llama-server to use, or None when there is none and one must be installed.

    `explicit` is the path from the configuration. Raises EngineMissing when that, or MODEL_BOSS_LLAMA_SERVER, names
    something that is not a program.
    """
    for candidate in _candidates(explicit, ask_version=False):
        if candidate.problem is None:
            return candidate.path
        if candidate.outright:
            raise errors.EngineMissing(f"{candidate.origin} names {candidate.path}, which {candidate.problem}")
    return None


def list_llama_servers(explicit: Path | str | None = None) -> list[Candidate]:
    """Every place, in order, with what is there; the first without a problem is the one that is used."""
    return list(_candidates(explicit, ask_version=True))


def _candidates(explicit: Path | str | None, *, ask_version: bool) -> Iterator[Candidate]:
    named = os.environ.get(VARIABLE)
    # The settings read that variable too; what they took from there is told under its name.
    if explicit is not None and not (named and Path(explicit).absolute() == Path(named).expanduser().absolute()):
        yield _named(Origin.SETTING, Path(explicit), ask_version)
    if named:
        yield _named(Origin.ENVIRONMENT, Path(named), ask_version)
    yield _on_path()
    yield from _built()


def _named(origin: Origin, path: Path, ask_version: bool) -> Candidate:
    path = path.expanduser()
    if not path.is_file():
        return Candidate(origin, path, None, None, "is not a file" if path.exists() else "does not exist")
    if not os.access(path, os.X_OK):
        return Candidate(origin, path, None, None, "is not executable")
    version = read_version(path) if ask_version else None
    if isinstance(version, Version):
        return Candidate(origin, path, str(version), None, None, version.problem)
    return Candidate(origin, path, None, None, None, version)


def _on_path() -> Candidate:
    found = shutil.which("llama-server")
    if found is None:
        return Candidate(Origin.PATH, None, None, None, "no llama-server on PATH")
    version = _version_on_path(Path(found), Path(found).stat().st_mtime_ns)
    if isinstance(version, str):
        return Candidate(Origin.PATH, Path(found), None, None, version)
    return Candidate(Origin.PATH, Path(found), str(version), None, version.problem)


@functools.lru_cache(maxsize=4)
def _version_on_path(program: Path, mtime_ns: int) -> Version | str:  # noqa: ARG001 - part of the cache's key
    """Ask once per file and process: the broker looks before every load, and a CUDA build takes a second to answer."""
    return read_version(program)


def _built() -> Iterator[Candidate]:
    entries = cache.installed()
    for entry in entries:
        problem = None
        if entry.version != VERSION:
            problem = f"built from {entry.version}; this Model Boss uses {VERSION}"
        elif not entry.fits_here:
            problem = f"built for another kind of machine ({entry.machine}), or incomplete"
        yield Candidate(Origin.CACHE, entry.binary, entry.reported, entry.accelerator, problem)
    if not entries:
        yield Candidate(Origin.CACHE, None, None, None, "none built: `model-boss engines install llama-server`")
