"""Who a process is, on recorded systems."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuboss import identity
from gpuboss.identity import Liveness, ProcessIdentity

STAT = "{pid} ({name}) {state} 1 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 {threads} 0 {start} 12000000 900 184 1 1 0"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A /proc of our making: `proc(7, state="S", threads=1, start=500)` adds a process."""
    monkeypatch.setattr(identity, "_PROC", str(tmp_path))
    monkeypatch.setattr(identity, "boot_id", lambda: "this-boot")
    monkeypatch.setattr(identity, "_has_proc", lambda: True)
    (tmp_path / "self").symlink_to(str(os.getpid()))

    def add(pid: int, *, name: str = "engine", state: str = "S", threads: int = 1, start: int = 500) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(
            STAT.format(pid=pid, name=name, state=state, threads=threads, start=start)
        )

    return add


def known(**changes: object) -> ProcessIdentity:
    return ProcessIdentity("this-boot", 7, 0, 500).replace(**changes)


def test_a_process_that_is_there_with_its_start_time_is_alive(proc: Callable[..., None]) -> None:
    proc(7)
    assert ProcessIdentity.of(7) == known()
    assert known().is_alive() is Liveness.ALIVE


def test_a_number_that_was_given_out_again_is_another_process(proc: Callable[..., None]) -> None:
    proc(7, start=501)
    assert known().is_alive() is Liveness.DEAD


def test_a_process_of_an_earlier_boot_is_dead_though_its_number_lives(proc: Callable[..., None]) -> None:
    proc(7)
    assert known(boot_id="last-boot").is_alive() is Liveness.DEAD


def test_a_process_of_another_pid_namespace_is_unknown_and_never_dead(proc: Callable[..., None]) -> None:
    assert known(pid_namespace=4026532999).is_alive() is Liveness.UNKNOWN


def test_a_process_without_an_entry_is_dead_when_no_signal_reaches_it(proc: Callable[..., None]) -> None:
    gone = known(pid=(1 << 22) - 1)
    assert gone.is_alive() is Liveness.DEAD
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(gone.pid)


@pytest.mark.parametrize("answer", [PermissionError(), None])
def test_a_process_hidden_from_proc_is_unknown(
    proc: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answer: Exception | None
) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (7, 0)
        if answer:
            raise answer

    monkeypatch.setattr(os, "kill", kill)
    assert known().is_alive() is Liveness.UNKNOWN


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_is_dead(proc: Callable[..., None], state: str) -> None:
    proc(7, state=state)
    assert known().is_alive() is Liveness.DEAD


def test_a_zombie_whose_other_threads_run_is_alive(proc: Callable[..., None]) -> None:
    proc(7, state="Z", threads=3)
    assert known().is_alive() is Liveness.ALIVE


def test_a_command_with_spaces_and_brackets_does_not_shift_the_fields(proc: Callable[..., None]) -> None:
    proc(7, name="my ) Z 1 (engine")
    assert known().is_alive() is Liveness.ALIVE


def test_a_proc_of_an_outer_namespace_says_nothing_about_our_numbers(proc: Callable[..., None], tmp_path: Path) -> None:
    proc(7)
    (tmp_path / "self").unlink()
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    assert known().is_alive() is Liveness.UNKNOWN
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(7)


@pytest.mark.parametrize("pid", [0, -1])
def test_numbers_that_mean_groups_are_no_processes(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(pid)


def test_liveness_refuses_to_be_taken_for_yes_or_no() -> None:
    with pytest.raises(TypeError, match="third answer"):
        bool(Liveness.UNKNOWN)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], str]:
    """A Mac by recorded output; what is not in the dictionary fails."""
    recorded: dict[tuple[str, ...], str] = {
        ("sysctl", "-n", "kern.uuid"): "8F0C1D2E-3A4B-5C6D-7E8F-90A1B2C3D4E5",
        ("sysctl", "-n", "kern.bootsessionuuid"): "E1D2C3B4-A5F6-4711-8899-AABBCCDDEEFF",
    }
    monkeypatch.setattr(identity, "_runner", lambda argv: recorded.get(argv, ""))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(identity, "_PROC", "/nonexistent")
    monkeypatch.setattr(identity, "_BOOT_ID_FILE", "/nonexistent")
    monkeypatch.setattr(identity, "_MACHINE_ID_FILES", ("/nonexistent",))
    return recorded


def test_a_mac_is_told_apart_by_its_uuid_and_its_boot_session(mac: dict[tuple[str, ...], str]) -> None:
    assert identity.machine_id() == "8f0c1d2e3a4b5c6d7e8f90a1b2c3d4e5"
    assert identity.boot_id() == "e1d2c3b4-a5f6-4711-8899-aabbccddeeff"
    assert identity.pid_namespace() == 0


def test_a_process_of_a_mac_is_known_by_what_ps_says(mac: dict[tuple[str, ...], str]) -> None:
    command = ("ps", "-o", "stat=,lstart=", "-p", "501")
    mac[command] = "S+   Thu Nov 20 09:15:42 2025"
    process = ProcessIdentity.of(501)
    assert process.is_alive() is Liveness.ALIVE
    mac[command] = "S+   Thu Nov 20 09:15:43 2025"
    assert process.is_alive() is Liveness.DEAD
    mac[command] = "Z    Thu Nov 20 09:15:42 2025"
    assert process.is_alive() is Liveness.DEAD
    del mac[command]
    assert process.is_alive() is Liveness.DEAD


def test_a_machine_without_an_id_goes_by_its_host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("", "uninitialized\n", "short"):
        (tmp_path / "machine-id").write_text(content)
        monkeypatch.setattr(identity, "_MACHINE_ID_FILES", (str(tmp_path / "machine-id"),))
        name = identity.machine_id()
        assert name.startswith("host-")
        assert "/" not in name


def test_a_boot_without_an_id_goes_by_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_BOOT_ID_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(identity, "_PROC", str(tmp_path))
    with pytest.raises(OSError, match="tells no boot apart"):
        identity.boot_id()
    (tmp_path / "stat").write_text("cpu 1 2 3\nbtime 1763630000\n")
    assert identity.boot_id() == "btime-1763630000"
