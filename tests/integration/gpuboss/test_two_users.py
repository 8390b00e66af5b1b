"""Two users on one box: ledgers of their own for declared devices, one ledger for a GPU, or a shared directory."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuboss import host_lock, keeper, state_dir
from gpuboss.client import Client
from gpuboss.devices import Device, DeviceKind, Reading, parse_devices
from gpuboss.identity import ProcessIdentity
from gpuboss.keeper import Keeper
from gpuboss.leases import Lease, LeaseState
from gpuboss.processes import _END_S, end_processes
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import StateDir
from tests.integration.gpuboss import users
from tests.integration.gpuboss.keeper_harness import MIB, QUICK, ask
from tests.integration.gpuboss.users import Say, Somebody

_WHY_NOT = users.why_not()
pytestmark = pytest.mark.skipif(_WHY_NOT != "", reason=_WHY_NOT)

ROBIN, WREN, STRANGER, GROUP = 12345, 65534, 4711, 4242
CARD = Device("GPU-two-users", DeviceKind.CUDA, "Test card", 0, 100 * MIB, 0, measured=True)


class Card:
    """A card that nobody uses."""

    def devices(self) -> Sequence[Device]:
        return [CARD]

    def read(self, pids: Collection[int]) -> Sequence[Reading]:
        return [Reading(CARD.id, 0, {}, time.monotonic())]


@dataclass
class Box:
    """A host whose users each have a home."""

    directory: Path
    people: list[Somebody] = field(default_factory=list)

    def home(self, uid: int) -> Path:
        path = self.directory / str(uid)
        if not path.exists():
            path.mkdir(mode=0o700)
            os.chown(path, uid, uid)
        return path

    def shared(self) -> Path:
        """A directory of the group, as /var/lib/gpuboss is meant to be."""
        path = self.directory / "shared"
        path.mkdir()
        os.chown(path, 0, GROUP)
        path.chmod(0o2770)
        return path

    def keeps(self, uid: int, directory: Path | None = None, *, devices: str | None = None) -> Somebody:
        """A keeper of this user; it has said its directory."""

        async def keep(say: Say) -> None:
            os.environ["XDG_STATE_HOME"] = str(self.directory / str(uid))
            state = StateDir.resolve(directory)
            say(str(state.root))
            await Keeper(state, _settings(directory, devices)).run()

        return self._somebody(uid, keep)

    def asks(
        self, uid: int, size: int, directory: Path | None = None, *, devices: str | None = None, device: str = "sim0"
    ) -> Somebody:
        """Says [state, lease] of a lease once it is asked for, and again once it is granted and in use."""

        async def use(say: Say) -> None:
            os.environ["XDG_STATE_HOME"] = str(self.directory / str(uid))
            async with await Client.connect(_settings(directory, devices), name=f"user {uid}") as client:
                lease = await client.acquire(ask(size * MIB, device))
                say([lease.state, lease.id])
                lease = await client.activate(await client.wait_granted(lease))
                say([lease.state, lease.id])
                await users.go()

        return self._somebody(uid, use)

    def _somebody(self, uid: int, what: Callable[[Say], Any]) -> Somebody:
        self.home(uid)
        groups = () if uid == STRANGER else (GROUP,)
        self.people.append(Somebody(uid, what, groups=groups, umask=0o077))
        return self.people[-1]


@pytest.fixture
def box(tmp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    tmp_dir.chmod(0o755)
    (tmp_dir / "locks").mkdir()
    (tmp_dir / "locks").chmod(0o1777)
    monkeypatch.setattr(host_lock, "_everybodys_directory", lambda: tmp_dir / "locks")
    monkeypatch.setattr(state_dir, "SYSTEM_DIR", tmp_dir / "none")
    made = Box(tmp_dir)
    yield made
    for person in reversed(made.people):
        person.kill()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for devices finds one card."""
    monkeypatch.setattr(keeper, "discover", lambda specs, reserve: [Card()])


def test_with_directories_of_their_own_declared_devices_are_everybodys_own(box: Box) -> None:
    roots = [box.keeps(uid, devices="sim0=100MiB").says() for uid in (ROBIN, WREN)]
    assert roots[0] != roots[1]
    for uid in (ROBIN, WREN):
        user = box.asks(uid, 100, devices="sim0=100MiB")
        assert user.says()[0] == LeaseState.GRANTED
        assert user.says()[0] == LeaseState.ACTIVE


@pytest.mark.usefixtures("card")
def test_the_second_ledger_of_a_gpu_is_refused_naming_the_firsts_owner_and_path(box: Box) -> None:
    first = box.keeps(ROBIN)
    root = first.says()
    assert box.asks(ROBIN, 100, device=CARD.id).says()[0] == LeaseState.GRANTED
    box.keeps(WREN).says()
    kind, message = box.asks(WREN, 100, device=CARD.id).says()
    assert kind == "LedgerConflict"
    for words in (CARD.name, CARD.id, f"process {first.pid} of user {ROBIN}", root, "GPUBOSS_STATE_DIR"):
        assert words in message


@pytest.mark.usefixtures("card")
def test_the_gpu_is_the_second_users_once_the_first_has_left_it(box: Box) -> None:
    first = box.keeps(ROBIN)
    first.says()
    assert box.asks(ROBIN, 100, device=CARD.id).says()[0] == LeaseState.GRANTED
    first.kill()
    box.keeps(WREN).says()
    assert box.asks(WREN, 100, device=CARD.id).says()[0] == LeaseState.GRANTED


def test_users_of_a_shared_directory_have_one_ledger_whoever_keeps_it(box: Box) -> None:
    shared, devices = box.shared(), "sim0=100MiB"
    first = box.keeps(ROBIN, shared, devices=devices)
    root = Path(first.says())
    holder = box.asks(ROBIN, 60, shared)
    assert [holder.says()[0] for _ in range(2)] == [LeaseState.GRANTED, LeaseState.ACTIVE]
    waiter = box.asks(WREN, 60, shared)
    assert waiter.says()[0] == LeaseState.QUEUED
    holder.kill()
    state, held = waiter.says(within_s=10)
    assert state == LeaseState.ACTIVE, "the keeper of one user sees the death and the row of another"
    # The other user keeps the ledger from now on: files, sockets, locks and the store's data are the group's.
    first.kill()
    box.keeps(WREN, shared, devices=devices).says()
    third = box.asks(ROBIN, 60, shared)
    state, asked = third.says()
    assert state == LeaseState.QUEUED
    seen = box._somebody(ROBIN, _shows(shared)).says()
    assert seen == {held: LeaseState.ACTIVE, asked: LeaseState.QUEUED}
    waiter.kill()
    assert third.says(within_s=10)[0] == LeaseState.ACTIVE
    assert not list(root.glob("store-unreadable-*"))
    assert {path.stat().st_gid for path in root.rglob("*")} == {GROUP}


def test_what_another_user_left_is_neither_ended_nor_waited_for(box: Box) -> None:
    left = subprocess.Popen(["sleep", "600"])
    try:

        async def end(say: Say) -> None:
            began_s = time.monotonic()
            done = await end_processes("a lease", [ProcessIdentity.of(left.pid)])
            say([done, time.monotonic() - began_s])

        done, took_s = box._somebody(ROBIN, end).says()
        assert not done
        assert took_s < _END_S, "the keeper's beats stood still for somebody whom it cannot end"
        assert left.poll() is None
    finally:
        left.kill()
        left.wait()


def test_who_is_not_of_the_group_is_told_whose_directory_it_is(box: Box) -> None:
    shared = box.shared()
    box.keeps(ROBIN, shared, devices="sim0=100MiB").says()
    kind, message = box.asks(STRANGER, 60, shared).says()
    assert kind == "StateDirError"
    for words in (str(shared), "Permission denied", "owner root, mode 2770", "GPUBOSS_STATE_DIR"):
        assert words in message


def test_the_private_directory_of_another_user_is_refused_with_its_owner(box: Box) -> None:
    private = box.home(ROBIN) / "state"
    box.keeps(ROBIN, private, devices="sim0=100MiB").says()
    box.home(ROBIN).chmod(0o755)
    private.chmod(0o755)
    kind, message = box.asks(WREN, 60, private).says()
    assert kind == "StateDirError"
    assert f"owner user {ROBIN}, mode 0700" in message
    assert "GPUBOSS_STATE_DIR" in message


def test_a_keepers_socket_that_is_closed_to_us_is_named_with_its_owner(box: Box) -> None:
    shared = box.shared()
    root = Path(box.keeps(ROBIN, shared, devices="sim0=100MiB").says())
    assert box.asks(ROBIN, 10, shared).says()[0] == LeaseState.GRANTED
    (root / "keeper.sock").chmod(0o700)
    kind, message = box.asks(WREN, 60, shared).says()
    assert kind == "StateDirError"
    assert f"{root}/keeper.sock is not open to " in message
    assert f"owner user {ROBIN}, mode 0700" in message


def _shows(shared: Path) -> Callable[[Say], Any]:
    async def show(say: Say) -> None:
        async with await Client.connect(_settings(shared, None), name="looks") as client:
            leases: Sequence[Lease] = (await client.snapshot()).leases
            say({lease.id: lease.state for lease in leases})

    return show


def _settings(directory: Path | None, devices: str | None) -> LedgerSettings:
    return LedgerSettings(
        state_dir=directory, devices=parse_devices(devices) if devices else None, reserve_bytes=0, timings=QUICK
    )
