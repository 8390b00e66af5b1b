"""Forked and spawned children of a process that holds leases: they hold their own, and leave their parent's alone."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest

import gpuboss
from gpuboss import session
from gpuboss.leases import LeaseState
from gpuboss.node_ledger import NodeLedger
from gpuboss.settings import LedgerSettings
from tests.integration.gpuboss.keeper_harness import ROOT, LedgerUnderTest
from tests.support import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
"""From Python 3.12 on every fork of a process with threads is warned of; here it is what is tested."""

_GPU_LIBRARIES = {"torch", "pynvml"}


@pytest.fixture
def settings(ledger: LedgerUnderTest) -> Iterator[LedgerSettings]:
    """Of the test's ledger; this process's session with it is closed afterwards."""
    yield ledger.settings
    session.close_all()


def holders(settings: LedgerSettings) -> dict[str, int]:
    """Lease id -> pid."""
    return {lease.id: lease.owner.pid for lease in gpuboss.snapshot(settings).leases}


def in_child(act: Callable[[], object]) -> int:
    """`act` in a child made with the bare `os.fork`, which ends as a script does; its exit code."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            act()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    return pid


def ended(pid: int) -> int:
    """The exit code, once it has ended."""
    found: list[int] = []

    def has_ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append(os.waitstatus_to_exitcode(status))
        return bool(done)

    wait_until(has_ended, f"the child {pid} to end")
    return found[0]


def test_a_forked_child_does_not_hold_its_parents_lease(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:

        def leave() -> None:
            assert not lease.is_ours
            lease.release()
            gpuboss.release(lease)
            lease.give_back_later()

        assert ended(in_child(leave)) == 0
        assert holders(settings) == {lease.id: os.getpid()}
        assert len(_rows(ledger)) == 1
        assert lease.is_ours
    assert holders(settings) == {}


def test_a_forked_child_is_told_whose_lease_it_would_change(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    """It would wait for a thread that it does not have, and read replies that are its parent's."""
    with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:
        for _ in range(2):
            gpuboss.acquire("1MiB", settings=settings).release()
        assert session.session_for(settings)._direct.owes

        def change() -> None:
            for call in (lambda: lease.resize("10MiB"), lambda: lease.resize("90MiB"), lambda: gpuboss.renew(lease)):
                with pytest.raises(RuntimeError, match=f"held by process {os.getppid()}.*forked child"):
                    call()
            assert (lease.lost, lease.lost_event.is_set(), lease.preempted) == (False, False, None)
            assert lease.env == {"GPUBOSS_LEASE": lease.id}
            repr(lease)

        child = in_child(change)
        try:
            assert ended(child) == 0
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            raise
        lease.resize("80MiB")
    assert holders(settings) == {}


def test_a_forked_child_that_leaves_the_block_leaves_the_lease(
    ledger: LedgerUnderTest, settings: LedgerSettings
) -> None:
    """As a script that forks in the block and lets its child run to the end of it."""
    me = os.getpid()
    pid = 0
    try:
        with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:
            pid = os.fork()
            if pid:
                assert ended(pid) == 0
                assert holders(settings) == {lease.id: me}
    finally:
        if os.getpid() != me:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    assert holders(settings) == {}
    assert not _rows(ledger)


def test_a_forked_child_holds_leases_of_its_own(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    mine, theirs = os.pipe()
    with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:

        def work() -> None:
            with gpuboss.hold("30MiB", gpus=2, settings=settings) as own:
                found = holders(settings)
                assert found == {lease.id: os.getppid(), own.id: os.getpid()}
                os.write(theirs, b"held")
                wait_until(lambda: len(holders(settings)) == 2, "its own eyes")
            session.close_all()

        pid = in_child(work)
        assert os.read(mine, 4) == b"held"
        assert ended(pid) == 0
        wait_until(lambda: holders(settings) == {lease.id: os.getpid()}, "the child's lease to be given back")
    os.close(mine)
    os.close(theirs)


def _rows(ledger: LedgerUnderTest) -> list[Any]:
    with NodeLedger(ledger.state.ledger_path) as books:
        return books.rows()


def _serve(settings: LedgerSettings, pipe: Connection) -> None:
    """A worker: holds a lease for every word it gets, and says whose it was; loads nothing that knows of a GPU."""
    loaded = _GPU_LIBRARIES & set(sys.modules)  # a forked worker has what its parent has
    for _ in iter(pipe.recv, None):
        with gpuboss.hold("10MiB", job="worker", wait=30, settings=settings) as lease:
            pipe.send((lease.id, os.getpid(), holders(settings)[lease.id]))
    assert _GPU_LIBRARIES & set(sys.modules) == loaded


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_hold_leases(
    how: Literal["fork", "spawn", "forkserver"], settings: LedgerSettings
) -> None:
    """As the workers of a DataLoader: made in the block, alive for as long as it, and used from there."""
    context = multiprocessing.get_context(how)
    with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:
        workers = []
        for _ in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(settings, theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        for _ in range(3):
            for _, pipe in workers:
                pipe.send("hold")
            for process, pipe in workers:
                assert pipe.poll(30)
                _, pid, owner = pipe.recv()
                assert pid == owner == process.pid
        assert holders(settings)[lease.id] == os.getpid()
        for process, pipe in workers:
            pipe.send(None)
            process.join(20)
            assert process.exitcode == 0
            pipe.close()
            process.close()
        assert holders(settings) == {lease.id: os.getpid()}
    assert holders(settings) == {}


def test_the_parent_hears_on_while_children_come_and_go(settings: LedgerSettings) -> None:
    """A child shares its parent's epoll and sockets: what it takes out or closes must not be missed by the parent."""
    for _ in range(3):
        with ThreadPoolExecutor(1) as threads:
            with gpuboss.hold("60MiB", gpus=2, settings=settings):
                waiting = threads.submit(_hold_all, settings)
                wait_until(lambda: _is_waiting(settings), "the waiter")
                pid = os.fork()
                if pid == 0:
                    _finalize()
                assert ended(pid) == 0
            began = time.monotonic()
            waiting.result(timeout=20)
            assert time.monotonic() - began < 3


def _finalize() -> None:
    """In a forked child: what the end of an event loop does, should anybody come to end the parent's there."""
    try:
        for sessions in session._parents:
            for one in sessions.by_key.values():
                for key in list(one._selector.get_map().values()):
                    one._selector.unregister(key.fileobj)
        session._parents.clear()
        gc.collect()
    finally:
        os._exit(0)


def _hold_all(settings: LedgerSettings) -> None:
    with gpuboss.hold("100MiB", gpus=2, settings=settings):
        pass


def _is_waiting(settings: LedgerSettings) -> bool:
    return any(lease.state is LeaseState.QUEUED for lease in gpuboss.snapshot(settings).leases)


def test_forks_while_other_threads_take_and_give(settings: LedgerSettings) -> None:
    """A fork finds other threads in the middle of anything; its child must not wait for a lock they hold for ever."""
    over = threading.Event()
    rounds = 0

    def churn() -> None:
        nonlocal rounds
        while not over.is_set():
            with gpuboss.hold("5MiB", settings=settings):
                rounds += 1

    def work() -> None:
        with gpuboss.hold("5MiB", wait=30, settings=settings):
            pass

    with ThreadPoolExecutor(3) as threads:
        churning = [threads.submit(churn) for _ in range(3)]
        try:
            for _ in range(8):
                assert ended(in_child(work)) == 0
        finally:
            over.set()
        for done in churning:
            done.result(timeout=20)
    assert rounds > 8
    wait_until(lambda: holders(settings) == {}, "every lease to be given back")


_PARENT = """
import json, os, sys, time
from pathlib import Path
import gpuboss
from gpuboss.settings import LedgerSettings

order = json.loads(sys.argv[1])
settings = LedgerSettings.from_wire(order["settings"], Path(order["state_dir"]))
with gpuboss.hold("60MiB", gpus=2, job="parent", settings=settings) as lease:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print(json.dumps([lease.id, child]), flush=True)
    time.sleep(600)
"""


def test_a_parent_killed_while_its_children_live_is_freed(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    """A child has its parent's connections and the lease's lock file; the parent is dead all the same."""
    order = {"state_dir": str(ledger.directory), "settings": ledger.settings.to_wire()}
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, json.dumps(order)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    ledger.started.append(parent)
    assert parent.stdout is not None
    lease_id, child = json.loads(parent.stdout.readline())
    try:
        assert list(holders(settings)) == [lease_id]
        parent.kill()
        parent.wait(20)
        with gpuboss.hold("100MiB", gpus=2, wait=10, settings=settings):
            assert Path(f"/proc/{child}").exists(), "nobody has ended it"
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_a_child_lets_go_of_what_the_keeper_knows_its_parent_by(settings: LedgerSettings) -> None:
    with gpuboss.hold("1MiB", settings=settings):
        pass
    descriptor = session.session_for(settings).client.fileno()
    assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("socket:")

    def look() -> None:
        assert str(Path(f"/proc/self/fd/{descriptor}").readlink()) == os.devnull

    assert ended(in_child(look)) == 0


def test_a_real_data_loader(settings: LedgerSettings) -> None:
    """The same with torch itself, where it is installed: its workers are forked in the block."""
    pytest.importorskip("torch")
    program = """
import json, sys
from pathlib import Path
import gpuboss
from gpuboss.settings import LedgerSettings
order = json.loads(sys.argv[1])
settings = LedgerSettings.from_wire(order["settings"], Path(order["state_dir"]))

class Numbers:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        with gpuboss.hold("5MiB", job="worker", settings=settings):
            return index

with gpuboss.hold("60MiB", gpus=2, job="training", settings=settings) as lease:
    from torch.utils.data import DataLoader
    seen = sum(int(batch.sum()) for batch in DataLoader(Numbers(), batch_size=8, num_workers=3))
    assert seen == sum(range(64)), seen
    assert [found.id for found in gpuboss.snapshot(settings).leases] == [lease.id]
"""
    order = {"state_dir": str(settings.state_dir), "settings": settings.to_wire()}
    subprocess.run([sys.executable, "-c", program, json.dumps(order)], check=True, cwd=ROOT, timeout=120)
