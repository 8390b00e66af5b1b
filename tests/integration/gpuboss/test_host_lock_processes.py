"""One process per host, with real processes that die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuboss.errors import LockHeld
from gpuboss.host_lock import HostLock
from tests.support import wait_until

HOLD = """
import sys, time
from pathlib import Path
from gpuboss.host_lock import HostLock
HostLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""
RACE = """
import sys
from pathlib import Path
from gpuboss.errors import LockHeld
from gpuboss.host_lock import HostLock
lock = HostLock(Path(sys.argv[1]))
sys.stdin.readline()
try:
    lock.acquire()
    print("won", flush=True)
except LockHeld as held:
    print("lost to", held.owner_pid, flush=True)
sys.stdin.readline()
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_killed_owner_leaves_the_lock_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "keeper.lock"
    for _ in range(5):
        owner = start(HOLD, path)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(LockHeld) as caught:
            HostLock(path).acquire()
        assert caught.value.owner_pid == owner.pid
        end(owner)
        with HostLock(path):
            pass


def test_of_many_at_once_one_wins_and_the_others_know_who(tmp_path: Path) -> None:
    racers = [start(RACE, tmp_path / "keeper.lock") for _ in range(6)]
    try:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = {racer.pid: racer.stdout.readline().split() for racer in racers if racer.stdout is not None}
        winners = [pid for pid, words in said.items() if words == ["won"]]
        assert len(winners) == 1
        assert [words for words in said.values() if words != ["won"]] == [["lost", "to", str(winners[0])]] * 5
    finally:
        for racer in racers:
            end(racer)
    wait_until(lambda: all(racer.poll() is not None for racer in racers), "all racers to be gone")
