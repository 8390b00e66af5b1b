"""Building an engine into the cache: once at a time, resumable, and complete or not there.

    1. there already?             then it is only chosen
    2. compiler, space            checked before anything is downloaded
    3. the lock                   a second build waits for the first, says so, and then takes its result (1)
    4. tools, source, cmake, ninja in `.work/<key>`, which survives an interruption: the next try goes on there
    5. the programs are tried, copied beside their place and renamed into it

Called by `model-boss engines install`. Blocks; reports through a callback.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from inference.engines import cache, errors, toolchain
from inference.engines.accelerator import Accelerator
from inference.engines.progress import Progress, Report, Stage, parse_ninja, run_logged, telling_lines
from inference.engines.recipe import Recipe
from inference.engines.source import Source
from inference.engines.versions import Version, read_version

_SPACE_BYTES: Mapping[Accelerator, int] = {
    Accelerator.CPU: 700 << 20,
    Accelerator.METAL: 700 << 20,
    Accelerator.VULKAN: 1500 << 20,
    Accelerator.CUDA: 4 << 30,
    Accelerator.HIP: 4 << 30,
}
"""Disk a build takes at its largest: archive twice while pip looks at it, tree, objects, programs."""


@dataclass(frozen=True, slots=True)
class Order:
    """One build."""

    recipe: Recipe
    source: Source
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables the accelerator's compiler needs."""
    force: bool = False
    """Build even if the cache holds the result."""
    jobs: int | None = None
    """Compilers at once; None decides by processors and memory."""


@dataclass(frozen=True, slots=True)
class _Site:
    """The directory a build works in."""

    work: Path
    lock_fd: int
    report: Report

    @property
    def log(self) -> Path:
        return self.work / "build.log"


def install(order: Order, report: Report) -> cache.Installed:
    """Return the engine of this order, built if need be. Raises a subclass of InstallError."""
    if (there := _there(order)) is not None:
        return there
    toolchain.check_compilers()
    work = cache.engines_dir() / ".work" / order.recipe.key
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.CacheNotWritable(f"cannot write to {work}: {error.strerror}; set XDG_CACHE_HOME") from error
    check_space(work, _SPACE_BYTES[order.recipe.accelerator])
    with build_lock(cache.engines_dir() / ".lock", report) as (lock_fd, waited):
        if (waited or not order.force) and (there := cache.find(order.recipe.key)) is not None:
            return there
        try:
            return _build(order, _Site(work, lock_fd, report))
        except OSError as error:  # such as a disk that somebody else filled meanwhile
            raise errors.BuildFailed(f"the build in {work} failed: {error}") from error


def check_space(work: Path, needed_bytes: int) -> None:
    """Raise NotEnoughSpace when the disk has less room than the build still needs."""
    used = sum(path.lstat().st_size for path in work.rglob("*") if path.is_file())
    missing = max(0, needed_bytes - used)
    free = shutil.disk_usage(work).free
    if free < missing:
        raise errors.NotEnoughSpace(
            f"the build needs {missing >> 20} MiB more in {work}, but the disk has {free >> 20} MiB left. "
            "Make room, or set XDG_CACHE_HOME to a directory on another disk"
        )


@contextmanager
def build_lock(path: Path, report: Report) -> Iterator[tuple[int, bool]]:
    """Hold the lock of all builds; give its descriptor, and whether somebody else had it first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        waited = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
            report(Progress(Stage.WAIT, f"another build is under way (process {owner}); waiting for it"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor, waited
    finally:
        os.close(descriptor)


def _there(order: Order) -> cache.Installed | None:
    entry = None if order.force else cache.find(order.recipe.key)
    if entry is not None:
        cache.choose(entry)
    return entry


def _build(order: Order, site: _Site) -> cache.Installed:
    started_s = time.monotonic()
    site.work.mkdir(parents=True, exist_ok=True)  # whoever held the lock before us may have tidied up
    site.log.write_text(f"{order.recipe}\n")
    tools = toolchain.build_tools(site.work / "tools", site.log, site.report)
    tree = order.source.prepare(site.work, site.log, site.report)
    environment = {**os.environ, **order.environment, **tools.environment}
    _configure(order, site, tools, tree, environment)
    _compile(order, site, tools, environment)
    entry = _publish(order, site, time.monotonic() - started_s)
    shutil.rmtree(site.work, ignore_errors=True)
    return entry


def _configure(
    order: Order, site: _Site, tools: toolchain.BuildTools, tree: Path, environment: Mapping[str, str]
) -> None:
    objects = site.work / "build"
    command: list[str | Path] = [
        tools.cmake,
        "-S",
        tree,
        "-B",
        objects,
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja}",
    ]
    command += order.recipe.flags
    resumed = objects.exists()
    site.report(Progress(Stage.CONFIGURE, "cmake looks at the machine"))
    status = run_logged(command, site.log, environment, keep_open=[site.lock_fd])
    if status != 0 and resumed:
        # What an interrupted build left may not suit today's compiler or cmake: once more from nothing.
        shutil.rmtree(objects)
        status = run_logged(command, site.log, environment, keep_open=[site.lock_fd])
    if status != 0:
        raise errors.BuildFailed(f"cmake failed ({status}); its log is {site.log}:\n{telling_lines(site.log)}")


def _compile(order: Order, site: _Site, tools: toolchain.BuildTools, environment: Mapping[str, str]) -> None:
    def on_line(line: str) -> None:
        if (step := parse_ninja(line)) is not None:
            site.report(Progress(Stage.COMPILE, step[2], step[0], step[1]))

    jobs = order.jobs or toolchain.jobs(order.recipe.accelerator not in {Accelerator.CPU, Accelerator.METAL})
    status = run_logged(
        [tools.ninja, "-C", site.work / "build", "-j", str(jobs), *order.recipe.targets],
        site.log,
        {**environment, "NINJA_STATUS": "[%f/%t] "},
        keep_open=[site.lock_fd],
        on_line=on_line,
    )
    if status != 0:
        raise errors.BuildFailed(
            f"compiling failed ({status}); the next try goes on from there; the log is {site.log}:\n"
            f"{telling_lines(site.log)}"
        )


def _publish(order: Order, site: _Site, build_s: float) -> cache.Installed:
    site.report(Progress(Stage.INSTALL, "trying the programs"))
    staging = site.work / "result"
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "bin").mkdir(parents=True)
    for name in order.recipe.targets:
        shutil.copy2(site.work / "build" / "bin" / name, staging / "bin" / name)
    shutil.copy2(site.log, staging / "build.log")
    version = read_version(staging / "bin" / order.recipe.targets[0])
    if not isinstance(version, Version):
        raise errors.BuildFailed(f"the finished {order.recipe.targets[0]} {version}; the log is {site.log}")
    place = cache.engines_dir() / order.recipe.key
    recipe = order.recipe
    entry = cache.Installed(place, recipe.version, recipe.accelerator, recipe.machine, str(version), round(build_s, 1))
    cache.write_note(entry, staging)
    if place.exists():
        # Engines that run from it keep their files open; it goes with the work directory.
        place.rename(site.work / f"replaced-{os.getpid()}")
    staging.rename(place)
    return entry
