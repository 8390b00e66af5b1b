"""The command of `gpuboss run`: forked before anything heavy is loaded, held at a gate until its lease is there.

Called by `gpuboss.cli.run` (which forks it) and `gpuboss.cli.supervise` (which lets it go, signals it and ends it).

1. It is forked while this program is small and has one thread, so that what follows is safe and quick.
2. It leads a process group of its own, and dies with us: PR_SET_PDEATHSIG on Linux, and the gate everywhere.
3. At the gate it reads a socket. Only the environment of a lease, ended by a word that says so, makes it execute the
   command; the bare end of the connection means that we are dead or gave up. With the environment comes the lease's
   lock file, which proves to keepers in other pid namespaces that the command lives, also when we do not.
4. Everything that carries the lease's name and everything in its process group belongs to it and is ended with it. As
   long as its dead leader is not collected, nobody else can get the group's number.

2 and 4 are Linux's in full. Elsewhere the group alone is ended, and nothing ends the command if we are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from gpuboss.cli.exits import Exit, exit_of_signal
from gpuboss.identity import ProcessIdentity
from gpuboss.light import Value

__all__ = ["Child", "Ended", "Stopped"]

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_GO = b"\0go"
_PROC = "/proc"
_MOST_HANDLES = 8


class Ended(Value):
    """The command's first process has ended."""

    __slots__ = ("exit_code", "signal")
    exit_code: int
    """Its own, or 128 + n."""
    signal: int | None
    """What ended it, if a signal did."""

    def __init__(self, exit_code: int, signal: int | None) -> None:
        self._fill(exit_code=exit_code, signal=signal)


class Stopped(Value):
    """The command's first process was suspended."""

    __slots__ = ("signal",)
    signal: int
    """By which signal."""

    def __init__(self, signal: int) -> None:
        self._fill(signal=signal)


class Child:
    """The command's first process, which leads its group. `fork` makes it."""

    def __init__(self, pid: int, opener: socket.socket) -> None:
        self.pid = pid
        """Also the number of its process group."""
        self.started = False
        """Whether it was let through the gate."""
        self._opener: socket.socket | None = opener
        self._ended: Ended | None = None
        self._collected = False

    @classmethod
    def fork(cls, command: Sequence[str]) -> Child:
        """A process that will execute the command, in this process's working directory and with its descriptors."""
        gate, opener = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status: int = Exit.NOT_EXECUTABLE
            try:
                opener.close()
                status = _become(command, gate, parent)
            finally:
                os._exit(status)
        gate.close()
        with contextlib.suppress(OSError):  # it does the same, and whoever comes second may be refused
            os.setpgid(pid, pid)
        return cls(pid, opener)

    def identity(self) -> ProcessIdentity:
        """Who it is; ProcessLookupError when it has ended."""
        return ProcessIdentity.of(self.pid)

    def start(self, environment: Mapping[str, str], handles: Sequence[int] = ()) -> None:
        """Open the gate: the command runs with these variables and open files besides our own."""
        assert self._opener is not None, "a child is started once"
        self.started = True
        words = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
        with contextlib.suppress(OSError):  # it has been killed, as `look` will tell
            socket.send_fds(self._opener, [words + _GO], list(handles))
        self._close_gate()

    def look(self) -> Ended | Stopped | None:
        """What has become of it since the last look; None when it goes on. An end is told again at every look."""
        if self._ended is None and not _LINUX:
            found = self._collect(os.WNOHANG | os.WUNTRACED)
            self._collected = isinstance(found, Ended)
            return found
        if self._ended is None:
            # Looked at and not collected: its number, which is its group's too, must not become somebody else's.
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if seen is None:
                return None
            if seen.si_code == os.CLD_STOPPED:
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)  # else it is told for ever
                return Stopped(seen.si_status)
            self._ended = _ended(seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status)
        return self._ended

    @property
    def has_ended(self) -> bool:
        """Whether a look has found it ended."""
        return self._ended is not None

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self._collected:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, where only zombies are left
            os.killpg(self.pid, number)

    def signal_leader(self, number: int) -> None:
        """Send a signal to the first process alone."""
        if self._ended is None:  # afterwards its number may be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def members(self) -> set[int]:
        """Living processes of its group. Empty where the system does not tell."""
        return _members(self.pid) if _LINUX and not self._collected else set()

    def abandon(self) -> None:
        """End it and its group, whatever they do, and collect it. Harmless when it was collected."""
        self._close_gate()
        if not self._collected:
            self.signal(signal.SIGKILL)
            self.collect()

    def collect(self) -> None:
        """Wait for its end and take it off the system's list; from then on its number may be another's."""
        if not self._collected:
            with contextlib.suppress(ChildProcessError):  # somebody ignores SIGCHLD on our behalf
                self._collect(0)
            self._collected = True

    def _collect(self, options: int) -> Ended | Stopped | None:
        pid, status = os.waitpid(self.pid, options)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            return Stopped(os.WSTOPSIG(status))
        self._ended = self._ended or _ended(os.waitstatus_to_exitcode(status))
        return self._ended

    def _close_gate(self) -> None:
        opener, self._opener = self._opener, None
        if opener is not None:
            opener.close()


def _ended(code: int) -> Ended:
    """From an exit code as Python writes it: negative for a signal."""
    return Ended(code, None) if code >= 0 else Ended(exit_of_signal(-code), -code)


def _become(command: Sequence[str], gate: socket.socket, parent: int) -> int:
    """In the forked child: wait at the gate, then be the command. Returns the exit status where that fails."""
    os.setpgid(0, 0)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _die_with(parent)
    words = _read_to_end(gate)
    if not words.endswith(_GO):
        return Exit.NOT_EXECUTABLE  # we are dead or gave up: nobody asks for this status
    for word in filter(None, words.removesuffix(_GO).split(b"\0")):
        name, _, value = word.partition(b"=")
        os.environb[name] = value
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's choice, which would be inherited
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))  # noqa: S606 (no shell is wanted)
    except FileNotFoundError:
        os.write(2, os.fsencode(f"gpuboss: {command[0]}: command not found\n"))
        return Exit.NOT_FOUND
    except OSError as error:
        os.write(2, os.fsencode(f"gpuboss: {command[0]} cannot be executed: {error.strerror}\n"))
    return Exit.NOT_EXECUTABLE


def _die_with(parent: int) -> None:
    """Have the kernel kill us when our parent dies. Linux only."""
    if not _LINUX:
        return
    import ctypes  # here, so that it is loaded beside the parent's work and not before it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(Exit.NOT_EXECUTABLE)


def _read_to_end(gate: socket.socket) -> bytes:
    """What is said at the gate. Files that come with it stay open in the command, and in all that it starts."""
    found = b""
    while True:
        part, handles, _, _ = socket.recv_fds(gate, 1 << 16, _MOST_HANDLES)
        for handle in handles:
            os.set_inheritable(handle, True)
        if not part:
            gate.close()
            return found
        found += part


def _members(group: int) -> set[int]:
    """Pids of the living processes of a process group."""
    found = set()
    for name in filter(str.isdigit, os.listdir(_PROC)):  # noqa: PTH208 (this runs before every end of a command)
        try:
            with open(f"{_PROC}/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                state, _, its_group = file.read().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            found.add(int(name))
    return found
