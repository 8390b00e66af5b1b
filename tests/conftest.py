"""Fixtures every tier shares."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no fault of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A run in the background of a script ignores Ctrl-C, and so would every program that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After a failure, say how the same order of tests is had again."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        seed = config.getoption("randomly_seed")
        terminalreporter.write_line(f'the same order again: make test ARGS="--randomly-seed={seed}"')


@pytest.fixture
def tmp_dir() -> Iterator[Path]:
    """A directory with a path short enough for unix sockets; removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The real engine; a run without it fails rather than skips, for it is what the project is about."""
    named = os.environ.get("MODEL_BOSS_LLAMA_SERVER")
    if named:
        return Path(named)
    from inference.engines import find_llama_server

    found = find_llama_server()
    assert found is not None, "no llama-server: run `make setup`, or set MODEL_BOSS_LLAMA_SERVER"
    return found


@pytest.fixture(scope="session")
def demo_models() -> Path:
    """The directory of the project's own demo models."""
    return ROOT / "demo" / "models"
