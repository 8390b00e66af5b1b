"""The files by which a broker finds engines that outlived another: whose they are, and what becomes of the rest."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, HolderKind, Lease, LeaseState
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


@contextmanager
def standing(*paths: Path) -> Iterator[None]:
    """A socket at each, bound with a name that is short enough."""
    before = Path.cwd()
    sockets = []
    for path in paths:
        os.chdir(path.parent)
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(path.name)
    os.chdir(before)
    yield
    for one in sockets:
        one.close()


def test_what_a_dead_shim_left_is_deleted_with_its_sockets(state: StateDir) -> None:
    path = write(state, shim=DEAD)
    sockets = [orphans.door_for(state, "abc"), state.root / "engine-1.sock"]
    with standing(*sockets):
        assert orphans.find(state) == []
    assert not any(left.exists() for left in (path, *sockets))


def test_sockets_in_the_directory_that_stands_in_for_a_long_path_are_deleted_too(tmp_path: Path) -> None:
    state = StateDir(tmp_path / ("long" * 30))
    state.root.mkdir()
    path, door = write(state, shim=DEAD), orphans.door_for(state, "abc")
    assert door.parent != state.root
    with standing(door):
        assert orphans.find(state) == []
    assert not path.exists()
    assert not door.exists()
    door.parent.rmdir()


@pytest.mark.parametrize("name", ["engine-1.sock", "elsewhere/engine-2.sock", "keeper.sock", "below/../engine-2.sock"])
def test_what_a_dead_shims_file_names_is_spared_unless_it_is_a_socket_of_ours(
    state: StateDir, tmp_path: Path, name: str
) -> None:
    victim = state.root / name
    for folder in ("elsewhere", "below"):
        (tmp_path / folder).mkdir()
    path = write(state, shim=DEAD, socket=str(victim))
    if name == "engine-1.sock":
        victim.write_text("precious")  # no socket, where one of ours would stand
        orphans.find(state)
    else:
        with standing(victim):
            orphans.find(state)
    assert not path.exists()
    assert victim.exists()


def with_changes(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Into the record, or into what stands below a key of it: `told__lease__epoch=...`."""

    def change(record: dict[str, Any]) -> None:
        for key, value in changes.items():
            *way, last = key.split("__")
            place = record
            for step in way:
                place = place[step]
            place[last] = value

    return change


@pytest.mark.parametrize("text", ["", "{", "[]", '{"protocol": 2}', '{"protocol": 2, "shim": {"pid": 1}}',
    "[" * 60_000, '{"told":' * 7_000 + "1" + "}" * 7_000, '{"shim":' + "9" * 60_000 + "}", "\0\xff" * 2_000,
    "{" + " " * 200_000])  # fmt: skip
def test_what_cannot_be_understood_is_deleted_and_the_rest_is_read(state: StateDir, text: str) -> None:
    path = write(state)
    path.rename(orphans.file_for(state, "the-rest"))
    path.touch(mode=0o600)
    path.write_text(text)
    assert len(orphans.find(state)) == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"shim__pid": 10**30},
        {"shim__pid": 2**31},
        {"shim__pid": "1"},
        {"shim__pid": 0},
        {"shim__pid": -1},
        {"shim__pid": True},
        {"shim__start_ticks": 1.5},
        {"shim__boot_id": None},
        {"shim__boot_id": "\x1b[2J"},
        {"engine__pid": [1]},
        {"protocol": [1]},
        {"protocol": "\ud800"},
        {"secret": 1},
        {"socket": "/tmp/a\0b"},
        {"socket": "/tmp/\ud800"},
        {"socket": "engine.sock"},
        {"told__socket": None},
        {"told__slot": ["owl"]},
        {"told__api_key": "k\r\nx: y"},
        {"told__load_s": float("nan")},
        {"told__load_s": float("inf")},
        {"told__load_s": 10**400},
        {"told__lease": None},
        {"told__lease__id": {}},
        {"told__lease__epoch": 2**63},
        {"told__lease__seq": "8"},
        {"told__lease__shares": 5},
        {"told__lease__shares": {"sim0": "5"}},
        {"told__broker__pid": 10**30},
    ],
)
def test_one_whose_values_cannot_be_is_deleted_and_the_rest_is_read(state: StateDir, changes: dict[str, Any]) -> None:
    path = write(state)
    record = json.loads(path.read_text())
    path.rename(orphans.file_for(state, "the-rest"))
    with_changes(**changes)(record)
    path.touch(mode=0o600)
    path.write_text(json.dumps(record))
    assert len(orphans.find(state)) == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "name", ["notes.txt", "x.json~", "x.json.²", "x.json.-5", "x.json.0", "x.json." + "9" * 20, "x.json.", ".json"]
)
def test_what_is_not_ours_by_its_name_is_left_alone_and_said_once(state: StateDir, name: str) -> None:
    stray = write(state).with_name(name)
    stray.touch(mode=0o600)
    with capture_logs() as said:
        assert len(orphans.find(state)) == 1, "the rest is read"
    assert stray.exists()
    assert [line["path"] for line in said if line["event"] == "orphan_unread"] == [str(stray)]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(mode=0o700), lambda path: os.mkfifo(path, 0o600)])
def test_what_is_no_file_is_left_alone_and_the_rest_is_read(state: StateDir, make: Callable[[Path], None]) -> None:
    stray = write(state).with_name("aaa.json")
    make(stray)
    assert len(orphans.find(state)) == 1
    assert stray.exists()


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


@pytest.mark.parametrize("protocol", [PROTOCOL + 1, PROTOCOL - 2, "2", None, 10**30])
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


def test_what_a_killed_shim_left_of_an_engine_is_forgotten_with_its_lease_and_nothing_else(state: StateDir) -> None:
    path = write(state)
    draft, others = path.with_name(f"{path.name}.4711"), write(state, name="abcd")
    draft.write_text("{")
    lease = Lease("abc", "abc", "slot:owl", HolderKind.SLOT, LeaseState.ACTIVE, {}, 10, Fence(7, 8), 1, ME, 0)
    orphans.forget(state, lease)
    assert list(path.parent.iterdir()) == [others]
