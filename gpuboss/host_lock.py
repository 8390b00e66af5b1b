"""A lock that one process of this host holds, and that says who holds it.

Called by the keeper (one per state directory, one ledger per GPU) and by the broker (one per state directory). The
kernel gives the lock back when its holder ends, however it ends; the file stays, for deleting it would let two
processes lock two files of one name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpuboss.errors import LockHeld, StateDirError
from gpuboss.identity import Liveness, ProcessIdentity

_MODE = 0o660
_SETTLE_S = 0.25
"""How long a holder is given to write its name after it took the lock."""


class HostLock:
    """`with HostLock(path, note="..."):` or `acquire` and `release`. Not inherited by processes started meanwhile."""

    def __init__(self, path: Path, *, note: str = "", mode: int = _MODE) -> None:
        self.path = path
        self.note = note
        """Told to those who find the lock held, e.g. the state directory it is for."""
        self._mode = mode
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._handle is not None

    def acquire(self) -> None:
        """Take the lock, or raise LockHeld, which names its owner. StateDirError when the file cannot be used."""
        if self._handle is not None:
            raise RuntimeError(f"{self.path} is already locked by this object")
        deadline = time.monotonic() + _SETTLE_S
        while (handle := self._try()) is None:
            owner = read_owner(self.path)
            # A name whose process lives is the owner's. None, or an earlier owner's: the new one is about to write.
            if owner.alive:
                raise LockHeld(
                    str(self.path),
                    owner_pid=owner.pid,
                    owner_command=owner.command,
                    owner_note=owner.note,
                    owner_user=owner.user,
                )
            if time.monotonic() > deadline:  # e.g. a process that the owner forked still has the file open
                raise LockHeld(str(self.path), owner_pid=None, owner_command=None, owner_note=None)
            time.sleep(0.005)
        self._handle = handle
        try:
            self._record()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    def __enter__(self) -> HostLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _try(self) -> int | None:
        """An open, locked file, or None when another process has it."""
        handle = _open(self.path, self._mode)
        keep = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Someone may have deleted the file since we opened it; then nobody else will find the one we locked.
            keep = os.path.samestat(os.fstat(handle), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            raise StateDirError(f"{self.path} cannot be locked ({error.strerror}) on its file system") from error
        finally:
            if not keep:
                os.close(handle)
        return handle if keep else None

    def _record(self) -> None:
        """Write who we are into the file, for those who find it locked."""
        assert self._handle is not None
        me = ProcessIdentity.current()
        words = {
            "pid": me.pid,
            "boot_id": me.boot_id,
            "pid_namespace": me.pid_namespace,
            "start_ticks": me.start_ticks,
            "command": " ".join(sys.argv)[:200] or sys.executable,
            "note": self.note,
            "user": user_name(os.geteuid()),
        }
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(words).encode(), 0)
        except OSError as error:
            # Another user's file that we may lock but not write: locked all the same, only without our name.
            if error.errno not in (errno.EBADF, errno.EINVAL):
                raise StateDirError(f"{self.path} cannot be written ({error.strerror})") from error


@dataclass(frozen=True, slots=True)
class Owner:
    """Who wrote its name into a lock file last; it need not hold the lock any more."""

    pid: int | None
    """None when there is no name to read."""
    command: str | None
    note: str | None
    alive: bool
    """Whether that process still runs, or may run where it cannot be seen."""
    user: str | None = None
    """Whose process it is."""


def read_owner(path: Path) -> Owner:
    """The name in a lock file. Whether the lock is held now, only an attempt to take it tells."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        who = ProcessIdentity(words["boot_id"], words["pid"], words["pid_namespace"], words["start_ticks"])
        alive = who.is_alive() is not Liveness.DEAD
        return Owner(who.pid, words["command"], words["note"] or None, alive=alive, user=words.get("user"))
    except (OSError, ValueError, KeyError, TypeError):
        return Owner(None, None, None, alive=False)


def gpu_lock(device_id: str, *, note: str) -> HostLock:
    """The host-wide lock of one GPU: it lets a ledger refuse a second one, whatever state directory that has.

    Any user may take it, and by that refuse the others: where users do not trust each other, share `/var/lib/gpuboss`.
    Containers that have their own /tmp and /run/lock do not see each other's.
    """
    safe = "".join(character if character.isalnum() or character == "-" else "_" for character in device_id)
    return HostLock(_everybodys_directory() / f"gpuboss-{safe}.lock", note=note, mode=0o666)


def user_name(uid: int) -> str:
    """What people call a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def whose(path: Path) -> str:
    """Owner and mode of a file, for people who may not use it."""
    status = path.lstat()
    return f"owner {user_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"


def _everybodys_directory() -> Path:
    """The same for every user of the host: by its mode, not by who asks."""
    run_lock = Path("/run/lock")
    if run_lock.is_dir() and run_lock.stat().st_mode & 0o1002 == 0o1002:
        return run_lock
    return Path("/tmp")  # noqa: S108 (host-wide by intent; opened without following links)


def _open(path: Path, mode: int) -> int:
    """Open the lock file, made if need be; read-only when it is another user's."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    attempts = (flags | os.O_RDWR, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, flags | os.O_RDWR, flags | os.O_RDONLY)
    failure: OSError | None = None
    # O_CREAT comes second and alone: in /tmp, Linux refuses it for a file that another user made.
    for attempt in attempts:
        try:
            handle = os.open(path, attempt, mode)
        except OSError as error:
            failure = error
            continue
        if attempt & os.O_CREAT:
            os.fchmod(handle, mode)  # the umask took rights from the group
        return handle
    assert failure is not None
    owner = f"; {whose(path)}" if isinstance(failure, PermissionError) and os.path.lexists(path) else ""
    raise StateDirError(f"{path} cannot be opened ({failure.strerror}{owner})") from failure
