"""A real Valkey for the tests of this directory."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from gpuboss.server import find_server
from tests.integration.gpuboss.keeper_harness import LedgerUnderTest, ledger_in
from tests.integration.gpuboss.script_harness import ScriptStore
from tests.support import wait_until


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A server on a unix socket that keeps nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as directory:
        socket = Path(directory) / "kv.sock"
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--save",
            "",
            "--dir",
            directory,
            "--logfile",
            f"{directory}/log",
        ]
        process = subprocess.Popen([find_server(), *options])
        try:
            wait_until(socket.exists, "the server's socket")
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[redis.Redis]:
    """A synchronous connection to the server."""
    with redis.Redis.from_url(valkey_url) as connection:
        wait_until(lambda: connection.ping(), "the server's answer")
        yield connection


@pytest.fixture
def scripts(valkey: redis.Redis) -> ScriptStore:
    """An empty pool that no node has synced with."""
    return ScriptStore(valkey)


@pytest.fixture
def ledger(tmp_dir: Path) -> Iterator[LedgerUnderTest]:
    """A ledger with two simulated devices of 100 MiB; afterwards its keeper and store must have left by themselves."""
    under_test = ledger_in(tmp_dir)
    yield under_test
    under_test.clean_up()
