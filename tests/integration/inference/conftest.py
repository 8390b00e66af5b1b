"""What the tests of slots and engines share: a real ledger on a declared device, and a look at what is left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from gpuboss.client import Client, LedgerSettings
from gpuboss.devices import parse_devices
from gpuboss.settings import Timings
from tests.integration.inference.slot_kit import Rig
from tests.support import until, wait_until


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """No process, no descriptor: whatever a test starts has to be gone when it ends."""
    uvloop.new_event_loop().close()  # the first one opens two descriptors that stay
    own = psutil.Process()
    before = {child.pid for child in own.children(recursive=True)}
    descriptors = own.num_fds()
    yield
    wait_until(
        lambda: {child.pid for child in own.children(recursive=True)} <= before, "all child processes to be gone"
    )
    gc.collect()
    wait_until(lambda: own.num_fds() <= descriptors, f"{own.num_fds() - descriptors} descriptors to be closed")


@pytest.fixture
async def ledger(tmp_dir: Path) -> AsyncIterator[Client]:
    """A ledger of its own with 64 MiB on `sim0`; its keeper goes with its last client."""
    settings = LedgerSettings(
        state_dir=tmp_dir / "state", devices=parse_devices("sim0=64MiB"), timings=Timings(linger_s=0.0)
    )
    client = await Client.connect(settings, name="test")
    keeper = client._link.welcome.pid
    yield client
    await client.close()
    await until(lambda: not psutil.pid_exists(keeper) or _reaped(keeper), "the keeper to be gone")
    assert not [name for name in _files_below(tmp_dir) if name.startswith("engine-") and name.endswith(".sock")]


def _files_below(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*")]


def _reaped(pid: int) -> bool:
    """A keeper that this process started is its child, and is seen off here."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


@pytest.fixture
async def rig(nothing_left_behind: None, ledger: Client, llama_server: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """Slots for demo models; nothing of them may be left when the test is over."""
    made = Rig(ledger, llama_server, demo_models / "robin.gguf")
    yield made
    await made.close()
