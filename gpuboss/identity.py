"""Who a process is, so that a number reused by the kernel is never taken for the process that had it before.

A pid alone is no name: it is given out again, means another process in every pid namespace, and starts anew at every
boot. `ProcessIdentity` adds all three. Called by the keeper (whose leases still have a process?), the shim and the
node ledger; light, because the shim imports it.

Linux reads /proc. macOS has no /proc and no pid namespaces: `ps` gives the start time in whole seconds, so there a
pid reused within one second of the same clock reading is not told apart.
"""

from __future__ import annotations

import enum
import os
import sys

from gpuboss.light import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PROC = "/proc"
_MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
_ZOMBIE_STATES = "ZXx"


class Liveness(enum.Enum):
    """What can be said about a process that was once identified."""

    ALIVE = "alive"
    """It runs: same boot, same pid namespace, same pid, same start time."""
    DEAD = "dead"
    """It is gone for sure: another boot, no such pid, another start time, or a zombie that holds nothing."""
    UNKNOWN = "unknown"
    """It cannot be seen from here (another pid namespace, a hidden /proc). Never to be treated as dead."""

    def __bool__(self) -> bool:
        raise TypeError("compare with Liveness.ALIVE or Liveness.DEAD: there is a third answer")


class ProcessIdentity(Value):
    """One process, for ever: two processes never share an identity."""

    __slots__ = ("boot_id", "pid", "pid_namespace", "start_ticks")
    boot_id: str
    """Which boot of the machine."""
    pid: int
    """The number of the process inside `pid_namespace`."""
    pid_namespace: int
    """Inode of the pid namespace in which `pid` is a number; 0 where the system has none."""
    start_ticks: int
    """Clock ticks after boot at which it started (Linux); seconds since 1970 elsewhere."""

    def __init__(self, boot_id: str, pid: int, pid_namespace: int, start_ticks: int) -> None:
        self._fill(boot_id=boot_id, pid=pid, pid_namespace=pid_namespace, start_ticks=start_ticks)

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        # "self" and not the pid: a /proc mounted by an outer pid namespace shows another process under our number.
        started = _started("self") if _has_proc() else _started_by_ps(os.getpid())
        if started is None:
            raise ProcessLookupError(f"cannot read the start time of the own process {os.getpid()}")
        return cls(boot_id(), os.getpid(), pid_namespace(), started)

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process with this number now, in the caller's pid namespace; ProcessLookupError when there is none."""
        started = None
        if pid > 0:
            if not _has_proc():
                started = _started_by_ps(pid)
            elif _proc_is_ours():
                started = _started(str(pid))
        if started is None:
            raise ProcessLookupError(f"no process {pid} is to be seen from here")
        return cls(boot_id(), pid, pid_namespace(), started)

    def is_alive(self) -> Liveness:
        """Whether the process still runs; UNKNOWN, never DEAD, where that cannot be seen."""
        if self.boot_id != boot_id():
            return Liveness.DEAD
        if self.pid_namespace != pid_namespace():
            return Liveness.UNKNOWN
        if not _has_proc():
            return Liveness.ALIVE if _started_by_ps(self.pid) == self.start_ticks else Liveness.DEAD
        if not _proc_is_ours():
            return Liveness.UNKNOWN
        stat = _stat(str(self.pid))
        if stat is None:
            return self._unseen()
        if stat.start_ticks != self.start_ticks or stat.gone:
            return Liveness.DEAD
        return Liveness.ALIVE

    def _unseen(self) -> Liveness:
        """There is no /proc entry: gone, or hidden from us (`hidepid`); a signal that does nothing tells which."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return Liveness.DEAD
        except PermissionError:
            return Liveness.UNKNOWN
        return Liveness.UNKNOWN


def machine_id() -> str:
    """A name for this machine that outlives a boot: systemd's machine id, macOS' platform UUID, else the host name.

    Containers often come without one; there the host name stands in, which is what tells them apart.
    """
    for path in _MACHINE_ID_FILES:
        text = _read(path)
        if text is not None and len(text.strip()) == 32 and text.strip().isalnum():
            return text.strip().lower()
    if sys.platform == "darwin":
        uuid = _command("sysctl", "-n", "kern.uuid")
        if uuid:
            return uuid.replace("-", "").lower()
    name = os.uname().nodename
    return "host-" + ("".join(c if c.isalnum() or c in "-." else "_" for c in name).lower().strip(".") or "unnamed")


def boot_id() -> str:
    """A name for this boot of the machine: two boots never share one."""
    text = _read(_BOOT_ID_FILE)
    if text is not None and text.strip():
        return text.strip()
    if sys.platform == "darwin":
        session = _command("sysctl", "-n", "kern.bootsessionuuid")
        if session:
            return session.lower()
    for line in (_read(f"{_PROC}/stat") or "").splitlines():
        if line.startswith("btime "):
            return "btime-" + line.split()[1]
    raise OSError(f"this system tells no boot apart from another: {_BOOT_ID_FILE} cannot be read")


def pid_namespace() -> int:
    """Inode of the caller's pid namespace; 0 where the system has none."""
    try:
        return os.stat(f"{_PROC}/self/ns/pid").st_ino  # noqa: PTH116 (pathlib costs 15 ms of interpreter start)
    except OSError:
        return 0


class _Stat(Value):
    """What is needed of /proc/<pid>/stat."""

    __slots__ = ("gone", "start_ticks")
    gone: bool
    start_ticks: int

    def __init__(self, *, gone: bool, start_ticks: int) -> None:
        self._fill(gone=gone, start_ticks=start_ticks)


def _stat(name: str) -> _Stat | None:
    """The entry of a process by its directory's name; None when there is none."""
    text = _read(f"{_PROC}/{name}/stat")
    if not text:
        return None
    # The second field is the command in brackets and may itself hold spaces and brackets: count from the last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    state, threads, start_ticks = fields[0], int(fields[17]), int(fields[19])
    # A zombie whose other threads run on (its main thread ended alone) still holds its memory.
    return _Stat(gone=state in _ZOMBIE_STATES and threads <= 1, start_ticks=start_ticks)


def _started(name: str) -> int | None:
    stat = _stat(name)
    return None if stat is None else stat.start_ticks


def _has_proc() -> bool:
    return sys.platform == "linux"


def _proc_is_ours() -> bool:
    """Whether /proc numbers processes as we do; not so where an outer pid namespace mounted it."""
    try:
        return os.readlink(f"{_PROC}/self") == str(os.getpid())  # noqa: PTH115 (pathlib costs 15 ms of interpreter start)
    except OSError:
        return False


def _started_by_ps(pid: int) -> int | None:
    """Seconds since 1970 at which the process started, as `ps` says; None when there is none or it is a zombie."""
    import time  # here: for macOS alone

    text = _command("ps", "-o", "stat=,lstart=", "-p", str(pid))
    if not text:
        return None
    state, _, started = text.partition(" ")
    if state.startswith("Z"):
        return None
    return int(time.mktime(time.strptime(" ".join(started.split()), "%a %b %d %H:%M:%S %Y")))


def _read(path: str) -> str | None:
    """A small text file; None when it is not there, may not be read, or its process ended meanwhile."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (pathlib costs 15 ms)
            return file.read()
    except OSError:
        return None


def _run(argv: tuple[str, ...]) -> str:
    import subprocess  # here: for macOS alone

    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=5, check=False, env={"LC_ALL": "C"} | _path()
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _path() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}


_runner: Callable[[tuple[str, ...]], str] = _run


def _command(*argv: str) -> str:
    """Output of a system tool; empty when it failed. The seam where tests put recorded output."""
    return _runner(argv)
