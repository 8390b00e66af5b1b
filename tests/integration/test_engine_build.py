"""Building an engine: interrupted, twice at once, without compiler, cmake, network, space or the right source."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inference.engines import build, cache, errors, toolchain
from inference.engines.progress import Progress, Stage
from inference.engines.recipe import PACKAGE, VERSION
from inference.engines.source import Archive
from tests.integration.fake_engine import order
from tests.support import wait_until


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


class Builds:
    """Builds in processes of their own; ended by pid afterwards."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        output = (self.here / f"output{len(self.processes)}").open("w")
        command = [sys.executable, "-m", "tests.integration.fake_engine", str(self.here)]
        with output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        self.processes.append(process)
        return process

    def said(self, number: int) -> str:
        return (self.here / f"output{number}").read_text()

    def steps(self) -> list[str]:
        path = self.here / "steps"
        return path.read_text().split() if path.exists() else []

    def waiter(self) -> psutil.Process:
        """The step that waits for the gate."""
        wait_until(lambda: (self.here / "waiter").exists() and (self.here / "waiter").read_text(), "step two to run")
        return psutil.Process(int((self.here / "waiter").read_text()))

    def open_gate(self, error: str = "") -> None:
        (self.here / "gate").write_text(error)

    def end(self) -> None:
        self.open_gate()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[Builds]:
    subject = Builds(tmp_path)
    yield subject
    subject.end()


def ignore(progress: Progress) -> None:
    """Report to nobody."""


# -- once, again, by force -----------------------------------------------------------------------------------------


def test_a_build_ends_in_the_cache_and_is_not_repeated(builds: Builds) -> None:
    builds.open_gate()
    seen: list[Progress] = []
    entry = build.install(order(builds.here), seen.append)
    assert entry.binary.parent.parent.parent == cache.engines_dir()
    assert entry.reported == "0.5.0-dev"
    assert (entry.directory / "build.log").read_text().count("[3/3]") == 1
    assert [(each.done, each.total) for each in seen if each.stage is Stage.COMPILE] == [(1, 3), (2, 3), (3, 3)]
    assert not list((cache.engines_dir() / ".work").iterdir()), "the work directory is tidied away"
    assert build.install(order(builds.here), ignore).binary == entry.binary
    assert builds.steps() == ["one", "two", "three"]


def test_force_builds_again_and_replaces(builds: Builds) -> None:
    builds.open_gate()
    first = build.install(order(builds.here), ignore)
    running = first.binary.open("rb")
    second = build.install(order(builds.here, force=True), ignore)
    assert second.directory == first.directory
    assert builds.steps() == ["one", "two", "three"] * 2
    assert b"version" in running.read(), "what runs from the old one keeps its file"
    running.close()


# -- interrupted ---------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_compilers_and_the_next_build_goes_on_there(builds: Builds) -> None:
    first = builds.start()
    waiter = builds.waiter()
    first.send_signal(signal.SIGINT)
    first.wait(20)
    wait_until(lambda: not waiter.is_running(), "the compiler to be ended")
    assert cache.installed() == [], "complete or not there"
    builds.open_gate()
    assert builds.start().wait(60) == 0
    assert "done" in builds.said(1)
    assert builds.steps() == ["one", "two", "two", "three"], "what was finished is not done again"


def test_after_kill_9_the_next_build_waits_for_the_orphans_and_goes_on(builds: Builds) -> None:
    first = builds.start()
    waiter = builds.waiter()
    first.kill()
    first.wait()
    assert waiter.is_running(), "the orphaned compiler still works in the directory"
    second = builds.start()
    wait_until(lambda: "waiting another build is under way" in builds.said(1), "the second build to say that it waits")
    assert builds.steps() == ["one", "two"], "nothing is built beside it"
    builds.open_gate()
    assert second.wait(60) == 0
    assert builds.steps().count("one") == 1
    assert builds.steps()[-1] == "three"


def test_what_an_older_cmake_left_behind_is_thrown_away_once(builds: Builds) -> None:
    builds.open_gate()
    objects = cache.engines_dir() / ".work" / order(builds.here).recipe.key / "build"
    objects.mkdir(parents=True)
    (objects / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/somewhere/else\n")
    assert build.install(order(builds.here), ignore).binary.exists()


# -- two at once ---------------------------------------------------------------------------------------------------


def test_of_two_builds_at_once_the_second_waits_says_so_and_takes_the_result(builds: Builds) -> None:
    first = builds.start()
    builds.waiter()
    second = builds.start()
    wait_until(lambda: "waiting another build" in builds.said(1), "the second build to say that it waits")
    assert f"process {first.pid}" in builds.said(1), "it names the first"
    builds.open_gate()
    assert first.wait(60) == 0
    assert second.wait(60) == 0
    assert builds.steps() == ["one", "two", "three"], "built once"
    assert builds.said(0).splitlines()[-1] == builds.said(1).splitlines()[-1]


# -- broken machines -----------------------------------------------------------------------------------------------


def test_a_failed_build_names_its_log_and_the_compilers_error(builds: Builds) -> None:
    builds.open_gate("no such header")
    with pytest.raises(errors.BuildFailed) as caught:
        build.install(order(builds.here), ignore)
    assert "two.cpp:1:1: error: no such header" in caught.value.message
    log = next(cache.engines_dir().glob(".work/*/build.log"))
    assert str(log) in caught.value.message
    builds.open_gate()
    assert build.install(order(builds.here), ignore).binary.exists(), "and can be tried again"


def test_without_a_compiler_nothing_is_touched(builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(errors.NoCompiler, match="no C and C\\+\\+ compilers found") as caught:
        build.install(order(builds.here), ignore)
    assert "build-essential" in caught.value.message
    assert not (tmp_path / "cache").exists(), "found out before anything else"


def test_a_compiler_that_cannot_compile_is_told_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(errors.NoCompiler, match="false cannot build a C\\+\\+17 program"):
        toolchain.check_compilers()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(errors.NoCompiler, match="/nowhere/c\\+\\+ does not run"):
        toolchain.check_compilers()


def test_too_little_disk_is_found_first_with_both_numbers(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 << 30, 10 << 30, 50 << 20))
    with pytest.raises(errors.NotEnoughSpace, match=r"needs 700 MiB more .* has 50 MiB left"):
        build.install(order(builds.here), ignore)
    assert builds.steps() == []


def test_a_cache_that_cannot_be_written_is_named(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(errors.CacheNotWritable, match="XDG_CACHE_HOME"):
        build.install(order(builds.here), ignore)


# -- cmake and ninja -----------------------------------------------------------------------------------------------


def hide(names: set[str], into: Path) -> str:
    """A PATH with links to everything on the real one except `names`."""
    into.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(directory).glob("*"):
            link = into / program.name
            if program.name not in names and os.access(program, os.X_OK) and not program.is_dir():
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return str(into)


def wheel(folder: Path, name: str, script: str) -> None:
    """A wheel that installs one script."""
    info = f"{name}-99.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as archive:
        program = zipfile.ZipInfo(f"{name}-99.0.data/scripts/{name}")
        program.external_attr = 0o100755 << 16
        archive.writestr(program, script)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_missing_cmake_and_ninja_are_fetched_as_wheels(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cmake", "ninja"):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"this test lends the system's {name} to a wheel, and there is none")
        # A marker shows that it ran from the wheel; PYTHONPATH is what the real wheels' scripts need.
        mark = f'echo "{name} $PYTHONPATH" >> {tmp_path}/ran'
        wheel(tmp_path / "wheels", name, f'#!/bin/sh\n{mark}\nexec {found} "$@"\n')
    monkeypatch.setenv("PATH", hide({"cmake", "ninja"}, tmp_path / "path"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    builds.open_gate()
    assert build.install(order(builds.here), ignore).binary.exists()
    ran = (tmp_path / "ran").read_text()
    assert "cmake /" in ran
    assert "ninja /" in ran


def test_cmake_that_is_neither_there_nor_to_be_had_is_told(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", hide({"cmake"}, tmp_path / "path"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(errors.NoBuildTools, match="package manager"):
        build.install(order(builds.here), ignore)


# -- the source ----------------------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath({marker!r}).touch()\nraise SystemExit('ran')\n"


def test_a_foreign_source_under_the_right_name_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, marker = tmp_path / "links", tmp_path / "it-ran"
    links.mkdir()
    content = EVIL.format(marker=str(marker)).encode()
    with tarfile.open(links / f"llama_cpp_python-{VERSION}.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo(f"llama_cpp_python-{VERSION}/setup.py")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    log = tmp_path / "log"
    with pytest.raises(errors.HashMismatch) as caught:
        Archive().prepare(tmp_path, log, ignore)
    assert hashlib.sha256((links / f"llama_cpp_python-{VERSION}.tar.gz").read_bytes()).hexdigest() in log.read_text()
    assert "another file than the pinned source" in caught.value.message
    assert not marker.exists()


def test_a_source_that_cannot_be_fetched_says_how_to_bring_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(errors.DownloadFailed, match="--source FILE") as caught:
        Archive().prepare(tmp_path, tmp_path / "log", ignore)
    assert f"{PACKAGE} {VERSION}" in caught.value.message
