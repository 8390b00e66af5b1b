"""Stands between the broker and an engine, so that no engine is left without a broker, whatever kills whom.

Started by `process.py` with `python -I -S`, and made of the standard library and `gpuboss.node_ledger` alone, so that
it is there quickly. It takes orders on stdin and reports on stdout, one JSON object per line:

    {"op": "launch", "argv", "env", "cwd", "log", "socket", "lease": LEASE}
    {"op": "ready", "file", "socket", "grace_s", "told"}    the engine serves; it may outlive this broker by `grace_s`
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
4. Not so an engine that was called ready and not ordered to end: the next broker may come to the door (`shim_door.py`)
   within the grace, and its connection is stdin and stdout from then on. Only when nobody came it is as in 3.
5. `kill -9` of the shim ends the engine with it (PR_SET_PDEATHSIG), and the keeper ends what the engine had started.
6. Descendants that detach themselves become children of the shim (PR_SET_CHILD_SUBREAPER) and are found there.

5 and 6 are Linux's. Elsewhere the engine's process group is ended, so that a descendant with a session of its own
escapes; that way (macOS) is written, but no test has run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time

from inference.shim_system import LINUX, adopt_descendants, become_engine, living_children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuboss.identity import ProcessIdentity
    from gpuboss.node_ledger import NodeLedger
    from inference.shim_door import Door

ORPHAN_GRACE_S = 0.3
"""Between TERM and KILL when the broker is dead; a broker that lives names the time itself."""
WEDGED_AFTER_S = 5.0
"""Without effect of SIGKILL before it is reported."""
KILL_EVERY_S = 0.02
"""Between two rounds of SIGKILL: descendants may have forked, or have just become our children."""

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Shim:
    """An engine's life: ordered, started, ended, reported. One engine at a time, and any number of them."""

    def __init__(self, ledger: str, wake: int) -> None:
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(_STDIN, select.POLLIN)
        self._poll.register(wake, select.POLLIN)
        self._orders: int | None = _STDIN
        """Where the broker's orders come from; None while there is no broker."""
        self._reports = _STDOUT
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
        self._door: Door | None = None
        """Where the next broker may come in; None where the engine is not to outlive this one."""
        self._grace_s = 0.0
        self._alone_until_s: float | None = None
        """Since a broker died: when the engine is ended, unless another has called it ready."""

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
            if self._orders in ready and not self._take_orders():
                return
            if self._door is not None:
                self._attend(self._door, ready)
            if self._engine is not None and self._all_dead():
                self._finish()
                if self._leaving or self._orders is None:
                    return
                self._forget()

    # -- orders ----------------------------------------------------------------------------------------------------

    def _take_orders(self) -> bool:
        """Read and perform orders; False when there is nothing left to do."""
        assert self._orders is not None
        try:
            data = os.read(self._orders, 1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return self._lose_broker(self._orders)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["op"] == "launch":
                self._launch(order)
            elif order["op"] == "ready":
                self._await_heirs(order)
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
                become_engine(order, shim)
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

    # -- one broker after the other --------------------------------------------------------------------------------

    def _await_heirs(self, order: dict[str, Any]) -> None:
        """Open the door, or change what stands on it. Where that fails the engine ends with its broker."""
        from gpuboss.identity import ProcessIdentity
        from inference.shim_door import Door

        if self._engine is None or self._kill_at_s is not None:  # it crossed with the engine's end
            return
        self._alone_until_s, self._grace_s = None, float(order["grace_s"])
        try:
            self._door = self._door or Door(self._poll, order["socket"])
            shim, engine = (_fields(ProcessIdentity.of(pid)) for pid in (os.getpid(), self._engine))
            self._door.tell(order["file"], order["told"], shim, engine)
        except OSError as error:
            self._close_door()
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(_STDERR, f"shim {os.getpid()}: no broker will be able to adopt its engine: {error}\n".encode())

    def _lose_broker(self, handle: int) -> bool:
        """3, 4: its orders have come to their end; False when nothing is left to do."""
        self._poll.unregister(handle)
        if handle != _STDIN:  # whose number must not become another file's
            os.close(handle)
        self._orders, self._pending = None, b""
        if self._door is None:
            return self._end("orphaned", ORPHAN_GRACE_S)
        self._alone_until_s = self._alone_until_s or time.monotonic() + self._grace_s
        return True

    def _attend(self, door: Door, ready: dict[int, int]) -> None:
        """Let the next broker in, and end what none came for."""
        heir = door.attend(ready, taken=self._orders is not None)
        if heir is not None:
            self._orders, protocol = heir
            self._reports = self._orders
            self._poll.register(self._orders, select.POLLIN)
            if protocol == 1:
                self._alone_until_s = None
        alone = self._orders is None and self._alone_until_s is not None
        if alone and time.monotonic() >= (self._alone_until_s or 0.0):
            self._end("orphaned", ORPHAN_GRACE_S)

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self, reason: str, grace_s: float) -> bool:
        """Begin to end the engine, or hasten an end under way; False when there is none."""
        # Also when the engine is being stopped already: that is then the reason for its end, and not for ours.
        self._leaving = self._leaving or reason == "orphaned"
        if self._engine is None:
            return False
        self._close_door()
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
                return LINUX or not self._group_lives()
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
                self._report("wedged", pids=living_children() or [self._engine])
                self._wedged_at_s = float("inf")
        return False

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal the engine's process group, and children that are not in it; everybody once."""
        assert self._engine is not None
        # The number of a collected engine may be another's. Its descendants are our children then, or soon will be.
        by_group = self._reaped is None or not LINUX
        if by_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._engine, number)
        if self._reaped is not None or number is signal.SIGTERM:
            for pid in living_children():
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
        self._close_door()
        with contextlib.suppress(OSError):
            os.unlink(self._socket)  # noqa: PTH108 (no pathlib here)
        self._ledger.remove(self._lease["id"], self._lease["epoch"], self._lease["seq"])
        status, usage = self._reaped
        code = os.waitstatus_to_exitcode(status)
        self._report(
            "exited",
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            max_rss_bytes=usage.ru_maxrss * (1024 if LINUX else 1),
            reason=self._reason,
        )

    # -- plumbing --------------------------------------------------------------------------------------------------

    def _patience_ms(self) -> int | None:
        due_s = self._kill_at_s
        if due_s is None and self._orders is None:
            due_s = self._alone_until_s
        if due_s is None:
            return None
        return max(0, int((due_s - time.monotonic()) * 1000) + 1)

    def _drain_wake(self) -> None:
        """Signals arrived: a child ended, or somebody wants the shim to go, which ends the engine first."""
        for number in os.read(self._wake, 1 << 10):
            if number != signal.SIGCHLD and not self._end("orphaned", ORPHAN_GRACE_S):
                sys.exit(0)

    def _report(self, event: str, **facts: object) -> None:
        if self._orders is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody is left; the end of stdin says so too
            os.write(self._reports, json.dumps({"event": event, **facts}).encode() + b"\n")


def _fields(process: ProcessIdentity) -> dict[str, Any]:
    return {name: getattr(process, name) for name in process.__slots__}


def main(ledger: str) -> None:
    """Prepare what every order needs, then serve."""
    # uvloop leaves children what is not marked otherwise: the ends of our own orders and reports, the broker's log.
    os.closerange(3, 1 << 16)
    adopt_descendants()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    shim = Shim(ledger, awake)
    shim.prepare()
    shim.run()
    os._exit(0)  # nothing is left to tidy up
