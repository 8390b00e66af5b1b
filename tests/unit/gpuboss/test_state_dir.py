"""Where a ledger keeps its files, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from gpuboss import identity, mounts, state_dir
from gpuboss.errors import StateDirError
from gpuboss.state_dir import StateDir


@pytest.fixture(autouse=True)
def no_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with no shared ledger, a user with nothing set."""
    for variable in ("GPUBOSS_STATE_DIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(state_dir, "SYSTEM_DIR", tmp_path / "none")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_machine_always_has_a_directory_of_its_own_below(tmp_path: Path) -> None:
    state = StateDir.resolve(tmp_path / "state")
    assert state.root == tmp_path / "state" / identity.machine_id()
    assert state.ledger_path.parent == state.root
    assert identity.boot_id() in state.ledger_path.name
    assert all(path.is_dir() for path in (state.store_dir, state.log_dir, state.holders_dir, state.locks_dir))
    assert state.lock_path("keeper") == state.locks_dir / "keeper.lock"
    assert StateDir.resolve(tmp_path / "state") == state


def test_what_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    state = StateDir.resolve(tmp_path / "state")
    assert {mode(path) for path in (tmp_path / "state", state.root, state.store_dir, state.locks_dir)} == {0o700}


def test_the_order_is_asked_then_environment_then_shared_then_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def base() -> Path:
        return StateDir.resolve().root.parent

    assert base() == tmp_path / "home" / ".local" / "state" / "gpuboss"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    assert base() == tmp_path / "home" / ".local" / "state" / "gpuboss"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert base() == tmp_path / "xdg" / "gpuboss"
    (tmp_path / "system").mkdir()
    monkeypatch.setattr(state_dir, "SYSTEM_DIR", tmp_path / "system")
    assert base() == tmp_path / "system"
    monkeypatch.setenv("GPUBOSS_STATE_DIR", str(tmp_path / "named"))
    assert base() == tmp_path / "named"
    assert StateDir.resolve(tmp_path / "asked").root.parent == tmp_path / "asked"


def test_a_directory_that_a_group_shares_passes_that_on(tmp_path: Path) -> None:
    base = tmp_path / "shared"
    base.mkdir()
    base.chmod(0o2770)
    before = os.umask(0o077)
    try:
        state = StateDir.resolve(base)
    finally:
        os.umask(before)
    assert {mode(path) for path in (state.root, state.store_dir, state.locks_dir)} == {0o2770}


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StateDirError, match=r"state is not a directory.*GPUBOSS_STATE_DIR"):
        StateDir.resolve(tmp_path / "state")
    with pytest.raises(StateDirError, match=r"part of it is a file.*GPUBOSS_STATE_DIR"):
        StateDir.resolve(tmp_path / "state" / "below" / "deeper")


def test_a_directory_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    state = StateDir.resolve(tmp_path)
    state.root.chmod(0o777)
    with pytest.raises(StateDirError, match=r"written by everybody \(owner .*, mode 0777\): `chmod o-w`"):
        StateDir.resolve(tmp_path)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir.resolve(tmp_path)
    if os.geteuid() == 0:
        os.chown(state.root, 4711, 4711)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(StateDirError, match=r"belongs to another user \(owner "):
        StateDir.resolve(tmp_path)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk .* is full: make room"), (errno.EDQUOT, "is full"), (errno.EROFS, "mounted read-only")],
)
def test_why_a_directory_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(**arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(StateDirError, match=rf"{tmp_path}.*{words}.*GPUBOSS_STATE_DIR"):
        StateDir.resolve(tmp_path)


def test_a_network_file_system_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "_table", lambda: [("/", "ext4"), (str(tmp_path), "nfs4")])
    with pytest.raises(StateDirError, match=r"network file system \(nfs4\).*GPUBOSS_STATE_DIR"):
        StateDir.resolve(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(StateDirError, match=r"no home directory: set GPUBOSS_STATE_DIR"):
        StateDir.resolve()


def test_sockets_stand_in_the_state_directory_where_their_path_is_short(tmp_dir: Path) -> None:
    state = StateDir.resolve(tmp_dir)
    assert state.socket_path("keeper") == state.root / "keeper.sock"


def test_a_long_path_gets_its_sockets_in_a_short_private_place_that_all_processes_find(
    tmp_path: Path, tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir.resolve(tmp_path / ("long" * 30))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_dir))
    path = state.socket_path("keeper")
    assert path.parent.parent == tmp_dir
    assert len(os.fsencode(path)) <= state_dir.LONGEST_SOCKET_PATH
    assert mode(path.parent) == 0o700
    assert path == StateDir.resolve(state.root.parent).socket_path("keeper")
    assert path.parent != StateDir.resolve(tmp_path / ("else" * 30)).socket_path("keeper").parent


def test_a_shared_directory_with_a_long_path_is_refused_when_a_socket_is_wanted(tmp_path: Path) -> None:
    base = tmp_path / ("long" * 30)
    base.mkdir()
    base.chmod(0o2770)
    state = StateDir.resolve(base)
    with pytest.raises(StateDirError, match=r"too long a path for a socket that a group shares.*GPUBOSS_STATE_DIR"):
        state.socket_path("keeper")


def test_without_a_runtime_directory_the_short_place_is_in_tmp(tmp_path: Path) -> None:
    state = StateDir.resolve(tmp_path / ("long" * 30))
    path = state.socket_path("keeper")
    try:
        assert path.parent.parent == Path("/tmp")
        assert mode(path.parent) == 0o700
        path.parent.chmod(0o755)
        with pytest.raises(StateDirError, match=rf"{path.parent}.*is not private \(owner .*, mode 0755\)"):
            state.socket_path("keeper")
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path)
        with pytest.raises(StateDirError, match="is not private"):
            state.socket_path("keeper")
        path.parent.unlink()
    finally:
        if path.parent.is_dir():
            path.parent.rmdir()


def test_ledgers_of_earlier_boots_are_forgotten_and_this_ones_kept(tmp_path: Path) -> None:
    state = StateDir.resolve(tmp_path)
    kept = [state.ledger_path, state.root / (state.ledger_path.name + "-wal")]
    gone = [state.root / "node-earlier.sqlite", state.root / "node-earlier.sqlite-shm"]
    for path in [*kept, *gone]:
        path.touch()
    state.forget_other_boots()
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)
