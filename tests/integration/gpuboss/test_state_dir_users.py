"""What a user without the right to write is told, with a real user who has none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuboss import host_lock
from gpuboss.errors import GpubossError, LockHeld
from gpuboss.host_lock import HostLock, gpu_lock
from gpuboss.node_ledger import NodeLedger
from gpuboss.state_dir import StateDir

STRANGER = 65534


def as_somebody_else(action: Callable[[], object]) -> str:
    """What `action` raised ("" for nothing) when run in a child process by a user who owns nothing here.

    A fork, and not another interpreter: that user may not be able to reach the interpreter's files.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads; this child takes no lock that a thread could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # nothing of the test run may happen in here, whatever goes wrong
        answer = "the child did not get far enough to say"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(STRANGER, STRANGER, STRANGER)
                os.setresuid(STRANGER, STRANGER, STRANGER)
            action()
            answer = ""
        except GpubossError as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def closed(tmp_dir: Path) -> Path:
    """A directory that can be looked into but not written by others, nor by its owner."""
    tmp_dir.chmod(0o755)
    path = tmp_dir / "closed"
    path.mkdir(mode=0o500)
    path.chmod(0o555)
    return path


def test_a_directory_we_may_not_write_is_named_with_owner_mode_and_setting(closed: Path) -> None:
    said = as_somebody_else(lambda: StateDir.resolve(closed / "state"))
    assert said.startswith(f"StateDirError: {closed}/state cannot be written by ")
    assert f"{closed}: owner " in said
    assert "mode 0555" in said
    assert "set GPUBOSS_STATE_DIR" in said


def test_a_directory_behind_a_closed_door_is_named_too(closed: Path) -> None:
    (closed.parent / "door").mkdir(mode=0o000)
    said = as_somebody_else(lambda: StateDir.resolve(closed.parent / "door" / "state"))
    assert "StateDirError" in said
    assert "Permission denied" in said
    (closed.parent / "door").chmod(0o700)


def test_a_ledger_that_we_may_not_write_is_named(closed: Path) -> None:
    said = as_somebody_else(lambda: NodeLedger(closed / "node.sqlite"))
    assert said.startswith(f"StateDirError: {closed}/node.sqlite cannot be made (Permission denied)")
    assert "GPUBOSS_STATE_DIR" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_the_ledger_of_another_user_is_not_ours(tmp_dir: Path) -> None:
    tmp_dir.chmod(0o755)
    StateDir.resolve(tmp_dir).root.chmod(0o755)
    said = as_somebody_else(lambda: StateDir.resolve(tmp_dir))
    assert "StateDirError" in said
    assert "GPUBOSS_STATE_DIR" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_a_lock_that_another_user_holds_names_that_users_process(
    tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_dir.chmod(0o1777)
    monkeypatch.setattr(host_lock, "_everybodys_directory", lambda: tmp_dir)
    with gpu_lock("GPU-1", note="/srv/state") as lock:
        said = as_somebody_else(gpu_lock("GPU-1", note="mine").acquire)
        assert said.startswith(f"LockHeld: {lock.path} is locked by process {os.getpid()} ")
    assert as_somebody_else(gpu_lock("GPU-1", note="mine").acquire) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_a_lock_file_we_may_only_read_can_still_be_locked(tmp_dir: Path) -> None:
    tmp_dir.chmod(0o755)
    path = tmp_dir / "x.lock"
    path.touch()
    path.chmod(0o644)

    def lock_twice() -> None:
        with HostLock(path), pytest.raises(LockHeld):
            HostLock(path).acquire()

    assert as_somebody_else(lock_twice) == ""
