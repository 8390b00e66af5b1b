"""The programs a build needs: a compiler (must be there), cmake and ninja (fetched as wheels where missing).

Called by `build.py`, the compiler check before anything is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inference.engines import errors
from inference.engines.progress import Progress, Report, Stage, run_logged, telling_lines

_MIN_CMAKE = (3, 24)
"""Older ones cannot find out the CUDA architecture of this machine by themselves."""

_PROGRAM = '#include <filesystem>\nint main() { return std::filesystem::path("a").empty(); }\n'


@dataclass(frozen=True, slots=True)
class BuildTools:
    """What drives the compiler."""

    cmake: Path
    ninja: Path
    environment: Mapping[str, str]
    """Variables the two need to run."""


def check_compilers() -> str:
    """Compile a small C++17 program; return the compiler's name. Raises NoCompiler with the packages to install."""
    c = os.environ.get("CC") or _first("cc", "gcc", "clang")
    cxx = os.environ.get("CXX") or _first("c++", "g++", "clang++")
    if c is None or cxx is None:
        what = "C and C++ compilers" if c is None and cxx is None else "C compiler" if c is None else "C++ compiler"
        raise errors.NoCompiler(f"no {what} found on this machine. {_compiler_advice()}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text(_PROGRAM)
        command = [*cxx.split(), "-std=c++17", str(source), "-o", str(source.with_suffix(""))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise errors.NoCompiler(f"the C++ compiler {cxx} does not run: {error}. {_compiler_advice()}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[:1] or [f"exit {done.returncode}"]
        raise errors.NoCompiler(f"{cxx} cannot build a C++17 program: {said[0]}. {_compiler_advice()}")
    return cxx


def build_tools(folder: Path, log: Path, report: Report) -> BuildTools:
    """Return cmake and ninja from PATH, or fetch both into `folder`. Raises NoBuildTools."""
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake and ninja and _cmake_version(cmake) >= _MIN_CMAKE:
        return BuildTools(Path(cmake), Path(ninja), {})
    fetched = BuildTools(folder / "bin" / "cmake", folder / "bin" / "ninja", {"PYTHONPATH": str(folder)})
    if not (fetched.cmake.exists() and fetched.ninja.exists()):
        report(Progress(Stage.TOOLS, "fetching cmake and ninja"))
        shutil.rmtree(folder, ignore_errors=True)
        _fetch_tools(folder, log)
    return fetched


def pip_command() -> list[str]:
    """Return how to call pip, so that the user's own pip settings apply. Raises NoBuildTools without a pip."""
    if importlib.util.find_spec("pip") is None:
        raise errors.NoBuildTools(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, then try again")
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def jobs(accelerated: bool) -> int:
    """How many compilers run at once: one per processor we may use, as far as memory reaches."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return processors
    each_bytes = (3 if accelerated else 1) << 30  # nvcc takes up to 3 GB per file
    return max(1, min(processors, memory_bytes // each_bytes))


def _fetch_tools(folder: Path, log: Path) -> None:
    # --no-user: a `user = true` in pip's configuration cannot be combined with --target.
    wanted = ["install", "--target", str(folder), "--no-user", "--only-binary", ":all:", "cmake>=3.24", "ninja>=1.11"]
    if run_logged([*pip_command(), *wanted], log, os.environ) != 0:
        raise errors.NoBuildTools(
            "cmake (3.24 or newer) and ninja are needed and pip could not fetch them:\n"
            f"{telling_lines(log)}\n"
            "Install both with your package manager (packages cmake and ninja-build), then try again"
        )


def _cmake_version(cmake: str) -> tuple[int, int]:
    try:
        said = subprocess.run([cmake, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"version (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _first(*names: str) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


def _compiler_advice() -> str:
    if platform.system() == "Darwin":
        return "Install Apple's: xcode-select --install"
    return (
        "Install one: `apt install build-essential` (Debian, Ubuntu), `dnf install gcc gcc-c++` (Fedora), "
        "`pacman -S base-devel` (Arch), `apk add build-base` (Alpine), or set CC and CXX"
    )
