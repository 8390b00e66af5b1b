"""The files by which a broker finds engines that outlived another: whose they are, and what becomes of the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence
from gpuboss.state_dir import StateDir
from gpuboss.wire import process_to_wire
from inference import orphans
from inference.orphans import Foreigner, Orphan, Past
from inference.shim_door import PROTOCOL

ME = ProcessIdentity.current()
DEAD = ME.replace(start_ticks=ME.start_ticks - 1)
ELSEWHERE = ME.replace(pid_namespace=ME.pid_namespace + 1)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def past_of(state: StateDir, *, broker: ProcessIdentity = DEAD) -> Past:
    return Past(
        slot_id="owl/robin#2",
        model_id="owl/robin",
        fingerprint="f",
        broker=broker,
        socket=state.root / "engine-1.sock",
        api_key="k",
        lease_id="abc",
        fence=Fence(7, 8),
        shares={"sim0": 5},
        load_s=1.5,
    )


def write(
    state: StateDir, *, shim: ProcessIdentity = ME, broker: ProcessIdentity = DEAD, name: str = "abc", **changes: Any
) -> Path:
    """A file as a shim writes it."""
    past = past_of(state, broker=broker)
    record = {
        "protocol": PROTOCOL,
        "shim": process_to_wire(shim),
        "engine": process_to_wire(shim.replace(pid=4_000_000)),
        "socket": str(orphans.door_for(state, "abc")),
        "secret": "s",
        "told": orphans.told_of(past),
    }
    path = orphans.file_for(state, name)
    path.touch(mode=0o600)
    path.write_text(json.dumps(record | changes))
    return path


def test_what_a_broker_told_the_next_one_reads(state: StateDir) -> None:
    write(state)
    [found] = orphans.find(state)
    assert isinstance(found, Orphan)
    assert found.past == past_of(state)
    assert (found.shim, found.engine_pid) == (ME, 4_000_000)
    assert (found.address.socket, found.address.secret) == (orphans.door_for(state, "abc"), "s")


def test_the_folder_is_private_and_one_that_is_not_is_not_read(state: StateDir) -> None:
    path = write(state)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o750)
    assert orphans.find(state) == []
    assert path.exists(), "it is left alone"


def test_a_file_that_others_may_read_or_a_link_is_left_alone(state: StateDir, tmp_path: Path) -> None:
    path = write(state)
    path.chmod(0o640)
    (path.parent / "link.json").symlink_to(tmp_path)
    assert orphans.find(state) == []
    assert path.exists()


def test_what_a_dead_shim_left_is_deleted_with_its_sockets(state: StateDir) -> None:
    path = write(state, shim=DEAD)
    sockets = [orphans.door_for(state, "abc"), state.root / "engine-1.sock"]
    for socket in sockets:
        socket.touch()
    assert orphans.find(state) == []
    assert not any(left.exists() for left in (path, *sockets))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"protocol": 2}', '{"protocol": 2, "shim": {"pid": 1}}'])
def test_what_cannot_be_understood_is_deleted(state: StateDir, text: str) -> None:
    path = write(state)
    path.write_text(text)
    assert orphans.find(state) == []
    assert not path.exists()


def test_a_draft_is_deleted_unless_it_is_being_written(state: StateDir) -> None:
    path = write(state)
    mine, dead = path.with_name(f"abc.json.{os.getpid()}"), path.with_name("abc.json.4000000")
    path.rename(mine)
    dead.touch(mode=0o600)
    assert orphans.find(state) == []
    assert (mine.exists(), dead.exists()) == (True, False)


@pytest.mark.parametrize(("shim", "broker"), [(ELSEWHERE, DEAD), (ME, ME), (ME, ELSEWHERE)])
def test_one_that_cannot_be_seen_or_that_has_a_broker_is_nobodys(
    state: StateDir, shim: ProcessIdentity, broker: ProcessIdentity
) -> None:
    path = write(state, shim=shim, broker=broker)
    assert orphans.find(state) == []
    assert path.exists()


@pytest.mark.parametrize("protocol", [PROTOCOL + 1, PROTOCOL - 2, "2", None])
def test_one_of_another_version_is_known_by_its_shim_alone(state: StateDir, protocol: object) -> None:
    write(state, protocol=protocol, told="something else")
    assert orphans.find(state) == [Foreigner(ME, protocol)]


def test_the_version_before_is_understood(state: StateDir) -> None:
    write(state, protocol=PROTOCOL - 1)
    [found] = orphans.find(state)
    assert isinstance(found, Orphan)
    assert found.address.protocol == PROTOCOL - 1


def test_where_the_folder_cannot_be_made_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "orphans").write_text("in the way")
    assert orphans.find(StateDir(tmp_path)) == []
