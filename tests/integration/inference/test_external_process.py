"""Which process a program is: by its command line, by its container."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuboss.identity import ProcessIdentity
from inference import external_process
from inference.external_process import find, find_in_container
from tests.support import wait_until

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', sys.argv[1]])"
NAME = f"program-{uuid.uuid4().hex}"


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A program and the child it started, both with `NAME` in their command lines."""
    with subprocess.Popen([sys.executable, "-c", PARENT, NAME], stdin=subprocess.PIPE) as parent:

        def children() -> list[psutil.Process]:
            return [
                one
                for one in psutil.Process(parent.pid).children()
                if NAME in one.cmdline() and PARENT not in one.cmdline()
            ]

        wait_until(children, "the child to run")
        [child] = children()
        yield parent, child
        parent.kill()
        child.kill()


def test_of_a_program_and_its_child_the_program_is_found_and_then_kept(
    family: tuple[subprocess.Popen[bytes], psutil.Process],
) -> None:
    parent, child = family
    pattern = re.compile(re.escape(NAME))
    found = find(pattern)
    assert found is not None
    assert found.pid == parent.pid
    known = ProcessIdentity.of(child.pid)
    assert find(pattern, known) == known, "while it lives nobody else is looked for"
    parent.kill()
    parent.wait()
    left = find(pattern, found)
    assert left is not None
    assert left.pid == child.pid


def test_nobody_is_found_where_nobody_matches() -> None:
    assert find(re.compile(uuid.uuid4().hex)) is None
    assert find_in_container("0" * 64) is None


def test_this_process_is_never_meant() -> None:
    own = " ".join(psutil.Process().cmdline())
    found = find(re.compile(f"^{re.escape(own)}$"))
    assert found is None or found.pid != os.getpid()


def test_of_a_containers_processes_the_first_is_found(
    family: tuple[subprocess.Popen[bytes], psutil.Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child = family
    container = uuid.uuid4().hex
    for pid in (parent.pid, child.pid):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods.slice/cri-containerd-{container}.scope\n")
    monkeypatch.setattr(external_process, "_PROC", tmp_path)
    found = find_in_container(container[:12])
    assert found is not None
    assert found.pid == parent.pid
