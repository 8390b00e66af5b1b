"""Starts a keeper, detached from whoever needs it.

Called by `gpuboss.keeper_link` when nobody answers the keeper's door. Of several processes that find no keeper at
once, one starts it (it holds `locks/keeper-start.lock` meanwhile); the keeper's own lock settles what is left of the
race.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gpuboss import errors
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import StateDir

__all__ = ["KeeperStarter"]

_KEPT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""A keeper outlives its starter and serves others: it gets neither its secrets nor the lease it may run under."""
_LONGEST_LOG = 4 << 20
_COME_UP_S = 5.0
"""After which a keeper whose door is not open is taken for failed and another one is started."""
_DIED_S = 0.05
"""The same for one that died on its way, doubled with every one that does, to `_COME_UP_S` at most."""


class KeeperStarter:
    """One attempt to have a keeper; `close` it when there is one."""

    def __init__(self, state: StateDir, settings: LedgerSettings) -> None:
        self._state = state
        self._settings = settings
        self._handle: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._life: int | None = None
        """The end of a pipe whose other end the keeper we started holds as long as it lives."""
        self._started_s: float | None = None
        self._starts = 0
        self._impatient_s = time.monotonic() + 2 * _COME_UP_S
        """From then on whoever holds the starters' lock is taken to be stuck."""

    @property
    def log_path(self) -> Path:
        """Where the keeper tells what it does and why it ended."""
        return self._state.log_dir / "keeper.log"

    def start(self) -> None:
        """Start a keeper unless somebody else is about to, or ours is on its way. Call again as long as nobody answers.

        Raises StoreUnavailable when the keeper cannot even begin, StateDirError when its files are not ours to write.
        """
        if self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._process = None  # gone into the background, or failed
            if code:
                raise errors.StoreUnavailable(f"the keeper does not start (exit code {code}): see {self.log_path}")
        elif self._is_due() and (self._take_lock() or time.monotonic() > self._impatient_s):
            self._started_s = time.monotonic()
            self._starts += 1
            self._process = self._spawn()

    def close(self) -> None:
        """Let others start the next one."""
        if self._process is not None:
            self._process.wait()  # the part in the foreground, which ends at once
            self._process = None
        for handle in (self._handle, self._life):
            if handle is not None:
                os.close(handle)
        self._handle = self._life = None

    def _is_due(self) -> bool:
        if self._started_s is None:
            return True
        pause_s = min(_DIED_S * 2 ** (self._starts - 1), _COME_UP_S) if self._died() else _COME_UP_S
        return time.monotonic() - self._started_s > pause_s

    def _died(self) -> bool:
        """Whether nobody holds the other end any more."""
        if self._life is None:
            return False
        try:
            return os.read(self._life, 1) == b""
        except BlockingIOError:
            return False

    def _take_lock(self) -> bool:
        if self._handle is None:
            handle = self._state.open_for_all(self._state.lock_path("keeper-start"), os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            self._handle = handle
        return True

    def _spawn(self) -> subprocess.Popen[bytes]:
        package_parent = str(Path(__file__).resolve().parent.parent)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        with contextlib.suppress(FileNotFoundError):
            if self.log_path.stat().st_size > _LONGEST_LOG:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
        if self._life is not None:
            os.close(self._life)
        self._life, held = os.pipe()
        os.set_blocking(self._life, False)
        command = [sys.executable, "-m", "gpuboss.keeper", "--state-dir", str(self._state.root.parent), "--detach"]
        with (
            os.fdopen(held, "wb"),
            os.fdopen(self._state.open_for_all(self.log_path, os.O_WRONLY | os.O_APPEND), "ab") as log,
        ):
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=kept | {"PYTHONPATH": package_parent},
                    start_new_session=True,
                    pass_fds=(held,),
                )
            except OSError as error:
                raise errors.StoreUnavailable(f"no keeper can be started: {error}") from error
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it failed at once; the log says why
            process.stdin.write(json.dumps(self._settings.to_wire()).encode())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process
