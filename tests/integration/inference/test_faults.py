"""Every way in which a real llama-server fails, and what its slot makes of it: the fault, and the words."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inference import oom_kills
from inference.errors import EngineDied, LoadFailed
from inference.events import SlotFailed
from inference.fault import Fault
from inference.slot import Slot
from tests.integration.inference.slot_kit import OPTIONS, Rig, wrapper

MEMORY_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Where version 1 and 2 have them."""


async def failed_load(rig: Rig, slot: Slot) -> SlotFailed:
    slot.start(OPTIONS, 10)
    failure = await rig.failed(slot)
    assert isinstance(failure.error, LoadFailed)
    assert not failure.was_ready
    assert failure.fault is failure.error.fault
    assert "; its log ends with:\n" in failure.error.message
    assert str(slot.model.path.parent) not in failure.error.message
    return failure


@pytest.mark.parametrize("args", [("--no-such-thing",), ("--top-k=many",), ("--lora", "nowhere.gguf")])
async def test_arguments_it_does_not_understand(rig: Rig, args: tuple[str, ...]) -> None:
    failure = await failed_load(rig, rig.slot("robin", extra_args=args))
    assert failure.fault is Fault.BAD_ARGUMENTS
    assert "its engine does not understand its arguments; it ended with code 1" in failure.error.message
    assert args[0].partition("=")[0] in failure.error.message or "lora" in failure.error.message


def truncated(robin: bytes) -> bytes:
    return robin[:100_000]


def foreign(robin: bytes) -> bytes:
    return b"PK\x03\x04" + robin


def of_an_unknown_architecture(robin: bytes) -> bytes:
    at = robin.index(b"llama", robin.index(b"general.architecture"))
    return robin[:at] + b"xlama" + robin[at + 5 :]


def without_a_tensor(robin: bytes) -> bytes:
    return robin.replace(b"blk.3.ffn_up.weight", b"blk.3.ffn_uq.weight")


@pytest.mark.parametrize("spoil", [truncated, foreign, of_an_unknown_architecture, without_a_tensor])
async def test_files_it_cannot_read(rig: Rig, tmp_dir: Path, spoil) -> None:
    broken = tmp_dir / "broken.gguf"
    broken.write_bytes(spoil(rig.file.read_bytes()))
    failure = await failed_load(rig, rig.slot("robin", path=broken))
    assert failure.fault is Fault.BAD_MODEL
    assert "its engine cannot read the model's file; it ended with code 1" in failure.error.message
    assert "broken.gguf" in failure.error.message


async def test_a_file_that_is_not_there(rig: Rig, tmp_dir: Path) -> None:
    assert (await failed_load(rig, rig.slot("robin", path=tmp_dir / "gone.gguf"))).fault is Fault.BAD_MODEL


async def test_memory_that_it_does_not_get(rig: Rig, tmp_dir: Path) -> None:
    """600 MB of address space are enough for the program, and not for 512 MiB of KV cache."""
    small = wrapper(tmp_dir / "small", f'ulimit -v 600000; exec {rig.binary} "$@"')
    failure = await failed_load(rig, rig.slot("robin", program=small, context=262_144))
    assert failure.fault is Fault.OUT_OF_MEMORY
    assert "its engine ran out of memory with 40MiB leased; it ended with code 1" in failure.error.message
    assert "failed to allocate" in failure.error.message


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that may have 48 MB; skips where nobody may make one."""
    root = next((root for root in MEMORY_GROUPS if (root / "cgroup.procs").exists()), None)
    if root is None:
        pytest.skip("no memory control groups here")
    group = root / f"model-boss-test-{os.getpid()}"
    limits = [group / "memory.limit_in_bytes", group / "memory.max"]
    try:
        group.mkdir()
        next(limit for limit in limits if limit.exists()).write_text(str(48 << 20))
    except (OSError, StopIteration) as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


async def test_a_kill_by_the_system_for_want_of_memory(rig: Rig, tmp_dir: Path, small_group: Path) -> None:
    """The kernel says so in its count alone: the signal is that of any kill."""
    before = oom_kills.count()
    small = wrapper(tmp_dir / "small", f'echo $$ > {small_group}/cgroup.procs; exec {rig.binary} "$@"')
    slot = rig.slot("robin", program=small, context=65_536)
    slot.start(OPTIONS, 10)
    failure = await rig.failed(slot)
    assert oom_kills.count() > before
    assert failure.fault is Fault.OUT_OF_MEMORY
    assert "its engine ran out of memory with 40MiB leased; it was killed by SIGKILL" in failure.error.message


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
async def test_a_crash_while_it_serves(rig: Rig, number: signal.Signals) -> None:
    slot = await rig.ready("robin")
    assert slot.pid is not None
    os.kill(slot.pid, number)
    failure = await rig.failed(slot)
    assert isinstance(failure.error, EngineDied)
    assert failure.was_ready
    assert failure.fault is Fault.CRASH
    assert f"the engine of 'robin' crashed; it was killed by {number.name}" in failure.error.message


async def test_a_crash_while_it_loads(rig: Rig, tmp_dir: Path) -> None:
    crashing = wrapper(tmp_dir / "crashing", "echo about to crash; kill -SEGV $$")
    failure = await failed_load(rig, rig.slot("robin", program=crashing))
    assert failure.fault is Fault.CRASH
    assert "its engine crashed; it was killed by SIGSEGV; its log ends with:\nabout to crash" in failure.error.message


async def test_an_exit_without_a_word_is_a_crash(rig: Rig, tmp_dir: Path) -> None:
    slot = rig.slot("robin", program=wrapper(tmp_dir / "leaving", "exit 3"))
    slot.start(OPTIONS, 10)
    failure = await rig.failed(slot)
    assert failure.fault is Fault.CRASH
    assert "its engine crashed; it ended with code 3" in failure.error.message


# -- logs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_log_disk(rig: Rig) -> Iterator[Path]:
    """The folder of the logs on a disk of 64 KiB without room; skips where nobody may mount one."""
    folder = rig.ledger.state.log_dir
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("nobody may mount a disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_costs_log_lines_and_nothing_else(rig: Rig, full_log_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (full_log_disk / "filler").write_bytes(bytes(1 << 20))
    slot = await rig.ready("robin")
    assert psutil.disk_usage(str(full_log_disk)).free == 0
    assert slot.pid is not None
    os.kill(slot.pid, signal.SIGSEGV)
    failure = await rig.failed(slot)
    assert failure.error.message == "the engine of 'robin' crashed; it was killed by SIGSEGV"
