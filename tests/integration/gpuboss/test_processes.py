"""Finding and ending what belongs to a lease, with real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboss.identity import ProcessIdentity
from gpuboss.processes import carriers, end_processes, family, living, name_of
from tests.integration.gpuboss.keeper_harness import gone
from tests.support import wait_until

_PARENT_OF_TWO = "import subprocess, sys; [subprocess.Popen(['sleep', '600']) for _ in range(2)]; sys.stdin.read()"


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two children, all of which carry the lease `abc`."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT_OF_TWO], env=os.environ | {"GPUBOSS_LEASE": "abc"}, stdin=subprocess.PIPE
    )
    wait_until(lambda: len(family(process.pid)) == 3, "the children")
    members = family(process.pid)
    yield process
    for pid in members:
        if not gone(pid):
            os.kill(pid, 9)
    process.communicate()


def test_a_family_is_a_process_and_all_below_it(tree: subprocess.Popen[bytes]) -> None:
    assert tree.pid in family(tree.pid)
    assert family(tree.pid) < family(os.getpid())
    assert family(2**22 - 1) == {2**22 - 1}


def test_carriers_are_known_by_their_environment_when_their_parent_is_dead(tree: subprocess.Popen[bytes]) -> None:
    children = family(tree.pid) - {tree.pid}
    tree.kill()
    tree.wait()
    assert {lease: set(pids) for lease, pids in carriers(["abc", "ab"]).items()} == {"abc": children}


def test_who_runs_is_named_whatever_it_is_called_and_a_zombie_runs_no_more(tmp_path: Path) -> None:
    shutil.copy("/bin/sleep", tmp_path / "a) Z (b")
    process = subprocess.Popen([tmp_path / "a) Z (b", "600"])
    wait_until(lambda: name_of(process.pid) == "a) Z (b", "the program to be executed")
    assert living([process.pid, 2**22 - 1]) == {process.pid: "a) Z (b"}
    process.kill()
    wait_until(lambda: gone(process.pid), "its end")
    assert name_of(process.pid) is None, "it is a zombie"
    process.wait()
    assert name_of(process.pid) is None


async def test_ending_a_lease_ends_all_its_processes(tree: subprocess.Popen[bytes]) -> None:
    members = family(tree.pid)
    assert await end_processes("abc", [ProcessIdentity.of(tree.pid)])
    assert all(gone(pid) for pid in members)
    assert await end_processes("abc", []), "nothing is left to do"


async def test_a_pid_of_another_namespace_is_neither_killed_nor_taken_for_dead(tree: subprocess.Popen[bytes]) -> None:
    seen = ProcessIdentity.of(tree.pid)
    elsewhere = ProcessIdentity(seen.boot_id, seen.pid, seen.pid_namespace + 1, seen.start_ticks)
    assert not await end_processes("another lease", [elsewhere])
    assert tree.poll() is None


async def test_a_reused_pid_is_left_alone(tree: subprocess.Popen[bytes]) -> None:
    seen = ProcessIdentity.of(tree.pid)
    earlier = ProcessIdentity(seen.boot_id, seen.pid, seen.pid_namespace, seen.start_ticks - 1)
    assert await end_processes("another lease", [earlier])
    assert tree.poll() is None
