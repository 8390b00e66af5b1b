"""Who a process is, with real processes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuboss.identity import Liveness, ProcessIdentity
from tests.support import wait_until

EXIT_SYSCALL = {"x86_64": 60, "aarch64": 93, "arm64": 93}
MAIN_THREAD_LEAVES = """
import ctypes, sys, threading, time
def stay():
    time.sleep(60)
threading.Thread(target=stay).start()
ctypes.CDLL(None).syscall({number}, 0)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux'")


def test_we_are_alive_and_the_same_by_every_way_of_asking() -> None:
    me = ProcessIdentity.current()
    assert me.is_alive() is Liveness.ALIVE
    assert me == ProcessIdentity.of(os.getpid())


def test_a_killed_child_is_dead_as_a_zombie_and_after() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    who = ProcessIdentity.of(child.pid)
    assert who.is_alive() is Liveness.ALIVE
    child.kill()
    wait_until(lambda: who.is_alive() is Liveness.DEAD, "the zombie to count as dead")  # nobody has waited for it yet
    child.wait()
    assert who.is_alive() is Liveness.DEAD


@linux
@pytest.mark.skipif(platform.machine() not in EXIT_SYSCALL, reason="the number of the exit call is not known here")
def test_a_process_whose_main_thread_ended_alone_is_alive() -> None:
    program = MAIN_THREAD_LEAVES.format(number=EXIT_SYSCALL[platform.machine()])
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", program])
    try:
        who = ProcessIdentity.of(child.pid)

        def main_thread_is_zombie() -> bool:
            return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

        wait_until(main_thread_is_zombie, "the main thread to end")
        assert who.is_alive() is Liveness.ALIVE
    finally:
        child.kill()
        child.wait()
    assert who.is_alive() is Liveness.DEAD


@linux
def test_from_inside_another_pid_namespace_a_living_process_is_unknown() -> None:
    unshare = shutil.which("unshare")
    inside = [str(unshare), "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system makes no pid namespaces for us")
    me = ProcessIdentity.current()
    program = (
        "from gpuboss.identity import ProcessIdentity; "
        f"print(ProcessIdentity({me.boot_id!r}, {me.pid}, {me.pid_namespace}, {me.start_ticks}).is_alive().value, "
        "ProcessIdentity.current().is_alive().value)"
    )
    done = subprocess.run([*inside, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["unknown", "alive"]
