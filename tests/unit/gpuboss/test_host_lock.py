"""One process per host, by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuboss import host_lock
from gpuboss.errors import LockHeld, StateDirError
from gpuboss.host_lock import HostLock, gpu_lock, read_owner


def test_a_held_lock_names_its_owner_and_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "keeper.lock"
    with HostLock(path, note="/srv/state") as lock:
        assert lock.held
        with pytest.raises(LockHeld, match=rf"{path} is locked by process {os.getpid()} .*, for /srv/state") as caught:
            HostLock(path).acquire()
        assert caught.value.owner_pid == os.getpid()
        assert read_owner(path).alive
    assert not lock.held
    with HostLock(path) as again:
        assert again.held


def test_a_lock_is_given_back_once_and_again_without_harm(tmp_path: Path) -> None:
    lock = HostLock(tmp_path / "x.lock")
    lock.release()
    lock.acquire()
    with pytest.raises(RuntimeError, match="already locked by this object"):
        lock.acquire()
    lock.release()
    lock.release()


def test_processes_started_meanwhile_do_not_inherit_it(tmp_path: Path) -> None:
    with HostLock(tmp_path / "x.lock") as lock:
        assert lock._handle is not None
        assert not os.get_inheritable(lock._handle)


def test_a_file_deleted_while_locked_does_not_let_two_in_by_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.lock"
    opened = host_lock._open
    deletions = iter([True])

    def open_then_lose(where: Path, mode: int) -> int:
        handle = opened(where, mode)
        if next(deletions, False):
            where.unlink()
        return handle

    monkeypatch.setattr(host_lock, "_open", open_then_lose)
    with HostLock(path) as lock:
        assert next(deletions, "used up") == "used up"
        assert lock._handle is not None
        assert os.fstat(lock._handle).st_ino == path.stat().st_ino
        monkeypatch.undo()
        with pytest.raises(LockHeld):
            HostLock(path).acquire()


def test_the_name_of_an_owner_before_is_not_given_out_as_the_owner_while_it_may_still_write(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with HostLock(path):
        words = json.loads(path.read_text())
        path.write_text(json.dumps(words | {"start_ticks": words["start_ticks"] - 1}))
        assert not read_owner(path).alive
        with pytest.raises(LockHeld, match="a process that left no name"):
            HostLock(path).acquire()


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"pid": "x"}'])
def test_a_file_without_a_name_is_locked_by_a_process_that_left_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.lock"
    with HostLock(path):
        path.write_text(content)
        with pytest.raises(LockHeld, match="a process that left no name") as caught:
            HostLock(path).acquire()
        assert caught.value.owner_pid is None


def test_a_link_in_the_place_of_a_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "x.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StateDirError, match=r"x\.lock cannot be opened"):
        HostLock(tmp_path / "x.lock").acquire()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateDirError, match=r"none/x\.lock cannot be opened \(No such file"):
        HostLock(tmp_path / "none" / "x.lock").acquire()


def test_every_user_looks_for_a_gpus_lock_in_the_same_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_lock, "_everybodys_directory", lambda: tmp_path)
    lock = gpu_lock("GPU-1/../2", note="/srv/state")
    assert lock.path == tmp_path / "gpuboss-GPU-1____2.lock"
    with lock:
        assert lock.path.stat().st_mode & 0o777 == 0o666
        with pytest.raises(LockHeld, match="/srv/state"):
            gpu_lock("GPU-1/../2", note="elsewhere").acquire()


def test_the_place_for_gpu_locks_is_one_that_everybody_may_write() -> None:
    assert host_lock._everybodys_directory().stat().st_mode & 0o002
