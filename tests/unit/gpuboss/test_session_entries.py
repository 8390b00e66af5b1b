"""A process's hand in the node's books: from any thread, across forks, and after the file has been made anew."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from gpuboss import entries, errors
from gpuboss.devices import Device, DeviceKind
from gpuboss.entries import Entries
from gpuboss.holders import is_held
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, HolderKind, Lease, LeaseState
from gpuboss.node_ledger import NodeLedger
from gpuboss.state_dir import StateDir

SIM = Device("sim0", DeviceKind.SIM, "simulated", 0, 100, 0, measured=False)
ME = ProcessIdentity.current()


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir.resolve(tmp_path)
    with NodeLedger(made.ledger_path) as books:
        books.put_devices([SIM])
    return made


def lease(lease_id: str = "one", size: int = 60, seq: int = 1) -> Lease:
    shares = {"sim0": size}
    return Lease(
        lease_id, lease_id, "job:a", HolderKind.JOB, LeaseState.GRANTED, shares, 10, Fence(1, seq), None, ME, 0
    )


def rows(state: StateDir) -> dict[str, int | None]:
    """Lease id -> pid."""
    with NodeLedger(state.ledger_path) as books:
        return {row.lease_id: row.pid for row in books.rows()}


def test_a_holder_has_a_row_and_a_locked_file_until_it_leaves(state: StateDir) -> None:
    hand = Entries(state)
    hand.enter(lease(), ME, own=True)
    hand.enter(lease(), ME, own=True)
    assert rows(state) == {"one": os.getpid()}
    assert (state.holders_dir / "one").exists()
    assert hand.has_row(lease())
    assert not hand.has_row(lease(seq=2))
    assert hand.leave("one")
    assert not hand.leave("one")
    assert rows(state) == {}
    hand.close()
    assert list(state.holders_dir.iterdir()) == []


def test_a_file_serves_one_lease_after_the_other_until_a_child_has_it_too(state: StateDir) -> None:
    hand = Entries(state)
    hand.lock("one", is_new=True)
    file = (state.holders_dir / "one").stat().st_ino
    hand.unlock("one")
    assert is_held(state.holders_dir / "one"), "kept for the next"
    hand.lock("two", is_new=True)
    assert (state.holders_dir / "two").stat().st_ino == file
    assert is_held(state.holders_dir / "two")
    assert not (state.holders_dir / "one").exists()
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(mine, 1)
        os._exit(0)
    hand.unlock("two")
    assert not (state.holders_dir / "two").exists()
    hand.lock("three", is_new=True)
    hand.unlock("three")
    hand.lock("three")
    assert is_held(state.holders_dir / "three"), "as one that is granted after a while"
    hand.unlock("three")
    (state.holders_dir / "three").unlink()
    hand.lock("four", is_new=True)
    assert is_held(state.holders_dir / "four"), "the spare one was deleted"
    hand.unlock("four")
    hand.close()
    assert list(state.holders_dir.iterdir()) == []
    os.write(theirs, b"x")
    os.waitpid(pid, 0)
    os.close(mine)
    os.close(theirs)


def test_a_holder_by_word_has_neither_process_nor_file(state: StateDir) -> None:
    hand = Entries(state)
    hand.enter(lease(), None, own=False)
    assert rows(state) == {"one": None}
    assert list(state.holders_dir.iterdir()) == []


def test_what_is_refused_leaves_nothing(state: StateDir) -> None:
    hand = Entries(state)
    hand.enter(lease(), ME, own=True)
    with pytest.raises(errors.ActivationRefused):
        hand.enter(lease("two"), ME, own=True)
    assert not hand.leave("two")
    assert rows(state) == {"one": os.getpid()}
    hand.close()
    assert [path.name for path in state.holders_dir.iterdir()] == ["one"]


def test_a_row_changes_its_size_and_only_that_of_its_own_fence(state: StateDir) -> None:
    hand = Entries(state)
    hand.enter(lease(), ME, own=True)
    hand.resize(lease(), {"sim0": 90})
    with pytest.raises(errors.ActivationRefused):
        hand.resize(lease(), {"sim0": 101})
    hand.resize(lease("never"), {"sim0": 1})
    with NodeLedger(state.ledger_path) as books:
        assert [row.shares for row in books.rows()] == [{"sim0": 90}]


def test_every_thread_may_use_it(state: StateDir) -> None:
    hand = Entries(state)
    failed: list[Exception] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                name = f"{number}-{turn}"
                hand.enter(lease(name, size=10), ME, own=True)
                assert hand.leave(name)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    hand.enter(lease(), ME, own=False)
    other = threading.Thread(target=hand.leave, args=("one",))
    other.start()
    other.join(30)
    assert rows(state) == {}


def test_a_book_that_was_made_anew_is_written_and_not_the_old_one(state: StateDir, tmp_path: Path) -> None:
    hand = Entries(state)
    hand.enter(lease("old"), ME, own=False)
    shutil.rmtree(state.root)
    fresh = StateDir.resolve(tmp_path)
    with NodeLedger(fresh.ledger_path) as books:
        books.put_devices([SIM])
    hand.enter(lease("new"), ME, own=False)
    assert rows(fresh) == {"new": os.getpid()}


def test_an_interrupted_entry_is_found_and_taken_out(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Entries(state)
    real = NodeLedger.admit

    def interrupted(self: NodeLedger, *arguments: object, **more: object) -> None:
        real(self, *arguments, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(NodeLedger, "admit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hand.enter(lease(), ME, own=True)
    assert rows(state) == {"one": os.getpid()}
    assert hand.leave("one")
    assert rows(state) == {}


def test_an_interrupted_transaction_does_not_lock_others_out(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C can come between the beginning of a transaction and the guard that ends it."""
    hand = Entries(state)
    hand.enter(lease(size=10), ME, own=False)

    def begun(self: NodeLedger, *_: object) -> bool:
        self._db.execute("BEGIN IMMEDIATE")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NodeLedger, "remove", begun)
        with pytest.raises(KeyboardInterrupt):
            hand.leave("one")
    with NodeLedger(state.ledger_path) as books:
        assert books.remove("one", 1, 1)


def test_who_interrupts_its_own_thread_in_the_books_is_kept_out(state: StateDir) -> None:
    hand = Entries(state)
    hand.enter(lease(size=10), ME, own=False)

    def in_the_middle(ledger: NodeLedger) -> None:
        assert hand.interrupted
        with ledger._transaction():
            for call in (lambda: hand.leave("one"), lambda: hand.enter(lease("two", size=10), ME, own=False)):
                with pytest.raises(RuntimeError, match="signal handler"):
                    call()
        ledger.note_epoch(7)

    hand._write(in_the_middle)
    assert not hand.interrupted
    assert rows(state) == {"one": os.getpid()}
    assert hand.leave("one")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_a_transaction_and_its_child_has_books_of_its_own(state: StateDir) -> None:
    hand = Entries(state)
    hand.enter(lease("parent", size=10), ME, own=False)
    before = entries._books
    inside, go_on, forked = threading.Event(), threading.Event(), threading.Event()

    def in_the_middle(_: NodeLedger) -> None:
        inside.set()
        go_on.wait(20)
        assert not forked.is_set(), "it was forked in the middle"

    thread = threading.Thread(target=hand._write, args=(in_the_middle,))
    thread.start()
    assert inside.wait(20)
    opener = threading.Timer(0.2, go_on.set)
    opener.start()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert entries._books is not before
            Entries(state).enter(lease("child", size=10), ProcessIdentity.current(), own=False)
            status = 0
        finally:
            os._exit(status)
    forked.set()
    assert go_on.is_set()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    thread.join(20)
    opener.join(20)
    assert rows(state) == {"parent": os.getpid(), "child": pid}
