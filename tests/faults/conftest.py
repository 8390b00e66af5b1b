"""A server of the fault tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.server import running_server
from tests.faults.store import ScriptServer


@pytest.fixture(scope="session")
def fault_socket() -> Iterator[Path]:
    """The socket of a server that any test here may empty."""
    with running_server() as path:
        yield path


@pytest.fixture
def fault_server(fault_socket: Path) -> Iterator[ScriptServer]:
    """All scripts as they are."""
    with ScriptServer(fault_socket) as server:
        yield server
