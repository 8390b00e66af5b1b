"""Lock files as signs of life: taken, inherited, looked at, swept away."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpuboss import holders
from gpuboss.errors import LockHeld, StateDirError
from gpuboss.holders import Evidence, HolderLock, is_held, sweep_away
from gpuboss.identity import Liveness, ProcessIdentity
from tests.support import wait_until


@pytest.fixture
def elsewhere() -> ProcessIdentity:
    """A process of another pid namespace."""
    return ProcessIdentity.current().replace(pid_namespace=1)


def test_a_lock_is_held_from_take_to_close_and_its_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "lease-1"
    assert is_held(path) is None
    lock = HolderLock(path)
    lock.take()
    assert is_held(path) is True
    with pytest.raises(RuntimeError, match="taken already"):
        lock.take()
    lock.close()
    lock.close()
    assert is_held(path) is False
    with pytest.raises(RuntimeError, match="not taken"):
        _ = lock.fd


def test_a_lock_that_another_holder_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_PATIENCE_S", 0.02)
    first = HolderLock(tmp_path / "lease-1")
    first.take()
    with pytest.raises(LockHeld, match=f"{tmp_path}/lease-1 is locked"):
        HolderLock(tmp_path / "lease-1").take()
    first.close()
    HolderLock(tmp_path / "lease-1").take()


def test_a_child_that_inherited_it_keeps_it_after_its_parent(tmp_path: Path) -> None:
    lock = HolderLock(tmp_path / "lease-1")
    lock.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fd,))
    lock.close()
    assert is_held(lock.path) is True
    child.communicate(b"\n")
    assert is_held(lock.path) is False


def test_a_program_executed_in_our_place_keeps_it(tmp_path: Path) -> None:
    program = (
        "import os, sys; from gpuboss.holders import HolderLock; lock = HolderLock(sys.argv[1]); lock.take(); "
        "os.execv('/bin/cat', ['cat'])"
    )
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lease-1")], stdin=subprocess.PIPE, cwd=root
    )
    wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "cat\n", "the program to be executed")
    assert is_held(tmp_path / "lease-1") is True
    process.communicate()
    assert is_held(tmp_path / "lease-1") is False


def test_a_file_deleted_while_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lease-1"
    real, deletions = os.fchmod, iter([True])

    def chmod_then_lose(handle: int, mode: int) -> None:
        real(handle, mode)
        if next(deletions, False):
            path.unlink()
            path.touch()

    monkeypatch.setattr(os, "fchmod", chmod_then_lose)
    lock = HolderLock(path)
    lock.take()
    assert next(deletions, "used up") == "used up"
    assert is_held(path) is True


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o2770, 0o660)])
def test_the_group_that_shares_the_directory_may_look(tmp_path: Path, directory: int, file: int) -> None:
    shared = tmp_path / "holders"
    shared.mkdir()
    shared.chmod(directory)
    before = os.umask(0o077)
    try:
        HolderLock(shared / "lease-1").take()
    finally:
        os.umask(before)
    assert stat.S_IMODE((shared / "lease-1").stat().st_mode) == file


def test_where_it_cannot_be_made_the_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateDirError, match=f"{tmp_path}/none/lease-1 cannot be made"):
        HolderLock(tmp_path / "none" / "lease-1").take()
    (tmp_path / "victim").touch()
    (tmp_path / "lease-1").symlink_to(tmp_path / "victim")
    with pytest.raises(StateDirError):
        HolderLock(tmp_path / "lease-1").take()
    assert is_held(tmp_path / "lease-1") is None


def test_a_process_that_cannot_be_seen_lives_as_long_as_its_file_is_locked(
    tmp_path: Path, elsewhere: ProcessIdentity
) -> None:
    evidence = Evidence(tmp_path)
    assert evidence.of("lease-1", elsewhere) is Liveness.UNKNOWN
    lock = HolderLock(tmp_path / "lease-1")
    lock.take()
    assert evidence.of("lease-1", elsewhere) is Liveness.ALIVE
    lock.close()
    assert evidence.of("lease-1", elsewhere) is Liveness.DEAD


def test_a_process_that_can_be_seen_needs_no_file(tmp_path: Path) -> None:
    evidence, me = Evidence(tmp_path), ProcessIdentity.current()
    (tmp_path / "lease-1").touch()
    assert evidence.of("lease-1", me) is Liveness.ALIVE
    lock = HolderLock(tmp_path / "lease-2")
    lock.take()
    assert evidence.of("lease-2", me.replace(start_ticks=me.start_ticks - 1)) is Liveness.DEAD


def test_a_leases_name_is_never_a_way_out_of_the_directory(tmp_path: Path, elsewhere: ProcessIdentity) -> None:
    (tmp_path / "holders").mkdir()
    (tmp_path / "free").touch()
    assert Evidence(tmp_path / "holders").of("../free", elsewhere) is Liveness.UNKNOWN


def test_files_without_a_row_that_nobody_holds_go_and_the_others_stay(tmp_path: Path) -> None:
    held = HolderLock(tmp_path / "about-to-be-admitted")
    held.take()
    for name in ("over", "has-a-row"):
        (tmp_path / name).touch()
    sweep_away(tmp_path, lambda: {"has-a-row"})
    assert {path.name for path in tmp_path.iterdir()} == {"about-to-be-admitted", "has-a-row"}
    assert is_held(tmp_path / "has-a-row") is False


def test_a_state_directory_that_goes_while_it_is_swept_is_nobodys_end(tmp_path: Path) -> None:
    sweep_away(tmp_path / "none", lambda: pytest.fail("nothing was found to ask about"))


def test_a_row_made_and_left_while_files_are_looked_at_keeps_its_file(tmp_path: Path) -> None:
    """A holder that was admitted after the last look and died before the sweep: the file is the only proof of it."""
    rows: set[str] = set()

    def rows_of_now() -> set[str]:
        assert is_held(tmp_path / "lease-1") is True, "the sweeper has the lock, so nobody is admitted meanwhile"
        return rows

    (tmp_path / "lease-1").touch()
    rows.add("lease-1")
    sweep_away(tmp_path, rows_of_now)
    assert is_held(tmp_path / "lease-1") is False
    rows.clear()
    sweep_away(tmp_path, rows_of_now)
    assert is_held(tmp_path / "lease-1") is None


def test_who_waits_for_the_lock_while_its_file_is_swept_away_makes_it_anew(tmp_path: Path) -> None:
    lock = HolderLock(tmp_path / "lease-1")
    (tmp_path / "lease-1").touch()
    taking = threading.Thread(target=lock.take)

    def rows() -> set[str]:
        taking.start()
        return set()

    sweep_away(tmp_path, rows)
    taking.join()
    assert is_held(tmp_path / "lease-1") is True
    lock.close()
