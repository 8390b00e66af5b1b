"""Stands between the broker and an engine, so that no engine outlives its broker, whatever kills whom.

Started by `process.py` with `python -I -S`, and made of the standard library and `gpuboss.node_ledger` alone, so that
it is there quickly. It takes orders on stdin and reports on stdout, one JSON object per line:

    {"op": "launch", "argv", "env", "cwd", "log", "socket", "lease": LEASE}
    {"op": "stop", "grace_s": 5.0}
    {"event": "started", "pid"}                          the engine runs and is in the node ledger
    {"event": "refused", "kind", "message", "settling_bytes"}   nothing runs; another launch may be ordered
    {"event": "exited", "code", "signal", "max_rss_bytes", "reason"}    its story is over
    {"event": "wedged", "pids"}                          SIGKILL has not ended these for `WEDGED_AFTER_S`

LEASE is {"id", "epoch", "seq", "holder", "shares", "terms"}.

1. Before the engine is executed, its use of memory is entered in the node ledger, which may refuse it.
2. After "exited" every descendant is dead, the ledger's row is gone and the socket is removed. The shim waits for the
   next launch then: a process that is there already saves a swap the start of an interpreter.
3. End of stdin means that the broker is dead: everything is ended (reason "orphaned"). Before a launch the shim just
   ends.
4. `kill -9` of the shim ends the engine with it (PR_SET_PDEATHSIG), and the keeper ends what the engine had started.
5. Descendants that detach themselves become children of the shim (PR_SET_CHILD_SUBREAPER) and are found there.

4 and 5 are Linux's. Elsewhere the engine's process group is ended, so that a descendant with a session of its own
escapes; that way (macOS) is written, but no test has run it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuboss.node_ledger import NodeLedger

ORPHAN_GRACE_S = 0.3
"""Between TERM and KILL when the broker is dead; a broker that lives names the time itself."""
WEDGED_AFTER_S = 5.0
"""Without effect of SIGKILL before it is reported."""
KILL_EVERY_S = 0.02
"""Between two rounds of SIGKILL: descendants may have forked, or have just become our children."""
OOM_SCORE = 500
"""Where memory runs out the kernel shall take the engine, which can be loaded again, not the broker or the store."""

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Shim:
    """An engine's life: ordered, started, ended, reported. One engine at a time, and any number of them."""

    def __init__(self, ledger: str, wake: int) -> None:
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(_STDIN, select.POLLIN)
        self._poll.register(wake, select.POLLIN)
        self._pending = b""
        self._ledger_path = ledger
        self._ledger: NodeLedger | None = None
        self._leaving = False
        """Nobody will give another order."""
        self._forget()

    def _forget(self) -> None:
        """Know of no engine."""
        self._lease: dict[str, Any] = {}
        self._socket = ""
        self._engine: int | None = None
        self._reaped: tuple[int, resource.struct_rusage] | None = None
        self._reason = "exit"
        self._kill_at_s: float | None = None
        self._wedged_at_s: float | None = None

    def prepare(self) -> None:
        """Do what takes time while nobody waits; what fails here fails again when it is needed, and is told then."""
        from gpuboss.errors import GpubossError

        with contextlib.suppress(GpubossError):
            self._open_ledger()

    def run(self) -> None:
        """Serve orders until there is nobody left to give them."""
        while True:
            ready = dict(self._poll.poll(self._patience_ms()))
            if self._wake in ready:
                self._drain_wake()
            if _STDIN in ready and not self._take_orders():
                return
            if self._engine is not None and self._all_dead():
                self._finish()
                if self._leaving:
                    return
                self._forget()

    # -- orders ----------------------------------------------------------------------------------------------------

    def _take_orders(self) -> bool:
        """Read and perform orders; False when there is nothing left to do."""
        try:
            data = os.read(_STDIN, 1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._poll.unregister(_STDIN)
            return self._end("orphaned", ORPHAN_GRACE_S)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["op"] == "launch":
                self._launch(order)
            else:  # without an engine it is one that crossed with "exited"
                self._end("stopped", float(order["grace_s"]))
        return True

    def _launch(self, order: dict[str, Any]) -> None:
        from gpuboss.errors import GpubossError
        from gpuboss.identity import ProcessIdentity

        try:
            self._enter(order)
        except GpubossError as error:
            settling_bytes = getattr(error, "settling_bytes", 0)
            self._report("refused", kind=type(error).__name__, message=error.message, settling_bytes=settling_bytes)
            return
        assert self._ledger is not None
        self._socket = order["socket"]
        try:
            self._engine = self._spawn(order)
        except OSError as error:
            self._ledger.remove(self._lease["id"], self._lease["epoch"], self._lease["seq"])
            message = f"{order['argv'][0]} cannot be started: {error.strerror}"
            self._report("refused", kind="Unstartable", message=message, settling_bytes=0)
            return
        with contextlib.suppress(ProcessLookupError):
            self._ledger.set_engine(self._lease["id"], self._engine, ProcessIdentity.of(self._engine).start_ticks)
        self._report("started", pid=self._engine)

    def _open_ledger(self) -> NodeLedger:
        from gpuboss.node_ledger import NodeLedger

        if self._ledger is None:
            self._ledger = NodeLedger(self._ledger_path)
        return self._ledger

    def _enter(self, order: dict[str, Any]) -> None:
        """Put the row into the node ledger, or raise its error."""
        from gpuboss.identity import ProcessIdentity
        from gpuboss.node_ledger import LedgerRow

        self._lease = lease = order["lease"]
        own = ProcessIdentity.current()
        self._open_ledger().admit(
            LedgerRow(
                lease_id=lease["id"],
                epoch=lease["epoch"],
                seq=lease["seq"],
                holder=lease["holder"],
                shares=lease["shares"],
                pid=own.pid,
                start_ticks=own.start_ticks,
                pid_namespace=own.pid_namespace,
                terms=lease["terms"],
            )
        )

    def _spawn(self, order: dict[str, Any]) -> int:
        """Start the engine in a session of its own; OSError when it cannot be executed."""
        shim = os.getpid()
        failure, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _become_engine(order, shim)
            except OSError as error:
                os.write(told, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(told)
        number = os.read(failure, 16)
        os.close(failure)
        if number:
            os.waitpid(pid, 0)
            raise OSError(int(number), os.strerror(int(number)))
        return pid

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self, reason: str, grace_s: float) -> bool:
        """Begin to end the engine, or hasten an end under way; False when there is none."""
        # Also when the engine is being stopped already: that is then the reason for its end, and not for ours.
        self._leaving = self._leaving or reason == "orphaned"
        if self._engine is None:
            return False
        if self._kill_at_s is None:
            self._reason = reason
        at_s = time.monotonic() + grace_s
        if grace_s > 0 and self._kill_at_s is None:
            self._signal_all(signal.SIGTERM)
        self._kill_at_s = at_s if self._kill_at_s is None else min(at_s, self._kill_at_s)
        return True

    def _all_dead(self) -> bool:
        """Collect the dead, and kill what is due; True once no descendant is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return _LINUX or not self._group_lives()
            if pid == 0:
                break
            if pid == self._engine:
                self._reaped = (status, usage)
                self._kill_at_s = time.monotonic()  # what it leaves behind has nothing more to do
        now_s = time.monotonic()
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._signal_all(signal.SIGKILL)
            self._kill_at_s = now_s + KILL_EVERY_S
            self._wedged_at_s = self._wedged_at_s or now_s + WEDGED_AFTER_S
            if now_s >= self._wedged_at_s:
                self._report("wedged", pids=_children() or [self._engine])
                self._wedged_at_s = float("inf")
        return False

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal the engine's process group, and children that are not in it; everybody once."""
        assert self._engine is not None
        # The number of a collected engine may be another's. Its descendants are our children then, or soon will be.
        by_group = self._reaped is None or not _LINUX
        if by_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._engine, number)
        if self._reaped is not None or number is signal.SIGTERM:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # A second SIGTERM would kill an engine that is about to exit because of the first.
                    if not (by_group and os.getpgid(pid) == self._engine):
                        os.kill(pid, number)

    def _group_lives(self) -> bool:
        assert self._engine is not None
        try:
            os.killpg(self._engine, 0)
        except (ProcessLookupError, PermissionError):  # the latter is macOS' answer for a group of zombies
            return False
        return True

    def _finish(self) -> None:
        """Take the row out and say how it ended. Where that fails, no report is sent, and the row is the keeper's."""
        assert self._ledger is not None
        assert self._reaped is not None
        with contextlib.suppress(OSError):
            os.unlink(self._socket)  # noqa: PTH108 (no pathlib here)
        self._ledger.remove(self._lease["id"], self._lease["epoch"], self._lease["seq"])
        status, usage = self._reaped
        code = os.waitstatus_to_exitcode(status)
        self._report(
            "exited",
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            max_rss_bytes=usage.ru_maxrss * (1024 if _LINUX else 1),
            reason=self._reason,
        )

    # -- plumbing --------------------------------------------------------------------------------------------------

    def _patience_ms(self) -> int | None:
        if self._kill_at_s is None:
            return None
        return max(0, int((self._kill_at_s - time.monotonic()) * 1000) + 1)

    def _drain_wake(self) -> None:
        """Signals arrived: a child ended, or somebody wants the shim to go, which ends the engine first."""
        for number in os.read(self._wake, 1 << 10):
            if number != signal.SIGCHLD and not self._end("orphaned", ORPHAN_GRACE_S):
                sys.exit(0)

    def _report(self, event: str, **facts: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody is left; the end of stdin says so too
            os.write(_STDOUT, json.dumps({"event": event, **facts}).encode() + b"\n")


def _become_engine(order: dict[str, Any], shim: int) -> None:
    """In the forked child: be a process that ends with the shim, knows nothing of it, and execute the engine."""
    os.setsid()
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:  # it died before the request to die with it was made
            os._exit(127)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 (no pathlib here)
            score.write(str(OOM_SCORE))
    signal.set_wakeup_fd(-1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's choice, which would be inherited
        signal.signal(ignored, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.umask(0o077)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), _STDIN)
    os.dup2(log, _STDOUT)
    os.dup2(log, _STDERR)
    os.chdir(order["cwd"])
    os.execve(order["argv"][0], order["argv"], order["env"])  # noqa: S606 (no shell is wanted)


def _children() -> list[int]:
    """Pids of our living children; empty where there is no /proc."""
    if not _LINUX:
        return []
    own = str(os.getpid())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (no pathlib here)
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if parent == own and state not in "ZX":
                found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    import ctypes  # here: Linux alone

    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number or errno.EPERM, os.strerror(number))


def main(ledger: str) -> None:
    """Prepare what every order needs, then serve."""
    # uvloop leaves children what is not marked otherwise: the ends of our own orders and reports, the broker's log.
    os.closerange(3, 1 << 16)
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    shim = Shim(ledger, awake)
    shim.prepare()
    shim.run()
    os._exit(0)  # nothing is left to tidy up
