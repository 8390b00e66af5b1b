"""Lock files by which a holder shows that it lives to those who cannot see its process.

`holders/<lease id>` in the state directory: the holder takes the lock before its row enters the node ledger, and it and
its children keep the file open. The kernel frees the lock when the last of them has ended, however they ended, and
whichever pid namespace (container) they were in. Taken by holders (`HolderLock`), looked at by the keeper (`Evidence`,
`sweep_away`), which counts on it where it cannot see the process itself. Light: see `gpuboss.light`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from gpuboss import errors
from gpuboss.identity import Liveness

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuboss.identity import ProcessIdentity

__all__ = ["Evidence", "HolderLock", "is_held", "sweep_away"]

_PATIENCE_S = 0.5
"""How long `take` bears with those who look whether the lock is held: they hold it for an instant."""
_GIVEN_AWAY = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)


class HolderLock:
    """One holder's lock: `take` it before the row is admitted, hand `fd` to children, `close` it at the end.

    The file stays; the keeper deletes it once the lease is over.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._handle: int | None = None

    @property
    def fd(self) -> int:
        """The open file, inherited by programs that are executed (`pass_fds` with `subprocess`)."""
        if self._handle is None:
            raise RuntimeError(f"{self.path} is not taken")
        return self._handle

    def take(self) -> None:
        """Make the file and lock it. LockHeld when another holder has it, StateDirError when it cannot be made."""
        if self._handle is not None:
            raise RuntimeError(f"{self.path} is taken already by this object")
        deadline_s = time.monotonic() + _PATIENCE_S
        while (handle := self._try()) is None:
            if time.monotonic() > deadline_s:
                raise errors.LockHeld(self.path, owner_pid=None, owner_command=None, owner_note=None)
            time.sleep(0.002)
        os.set_inheritable(handle, True)
        self._handle = handle

    def close(self) -> None:
        """Close our file; what children inherited stays locked. Harmless when it is closed already."""
        # Closed and not unlocked: an unlocking would undo the children's lock too.
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    def _try(self) -> int | None:
        """The open, locked file; None when somebody has it, or the keeper deleted it meanwhile."""
        shared = 0o2020
        try:
            mode = 0o660 if os.stat(os.path.dirname(self.path)).st_mode & shared == shared else 0o600  # noqa: PTH116, PTH120
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        except OSError as error:
            raise errors.StateDirError(
                f"{self.path} cannot be made ({error.strerror}): see its directory's owner and mode, "
                "or set GPUBOSS_STATE_DIR"
            ) from error
        kept = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_uid == os.geteuid():
                os.fchmod(handle, mode)  # the umask took the group's right to look
            found = os.stat(self.path)  # noqa: PTH116
            kept = (found.st_dev, found.st_ino) == (os.fstat(handle).st_dev, os.fstat(handle).st_ino)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _GIVEN_AWAY:
                raise errors.StateDirError(f"{self.path} cannot be locked ({error.strerror})") from error
            return None
        finally:
            if not kept:
                os.close(handle)
        return handle if kept else None


def is_held(path: str | os.PathLike[str]) -> bool | None:
    """Whether somebody holds the lock; None when there is no such file, or it may not be looked at."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in _GIVEN_AWAY else None
    else:
        return False
    finally:
        os.close(handle)


class Evidence:
    """What is known of the lives of holders."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """`directory`: `StateDir.holders_dir`."""
        self._directory = os.fspath(directory)

    def of(self, lease_id: str, process: ProcessIdentity) -> Liveness:
        """Whether a process that holds a lease lives: by its own signs, else by the lease's lock file.

        Without either it is UNKNOWN, and never to be taken for dead.
        """
        seen = process.is_alive()
        if seen is not Liveness.UNKNOWN or os.sep in lease_id:
            return seen
        held = is_held(f"{self._directory}/{lease_id}")
        if held is None:
            return Liveness.UNKNOWN
        return Liveness.ALIVE if held else Liveness.DEAD


def sweep_away(directory: str | os.PathLike[str], rows: Callable[[], Collection[str]]) -> None:
    """Delete the files that nobody holds of leases that have no row in the node ledger, as `rows` tells.

    A holder takes the lock before its row is made. So the rows are asked for while we have the lock: whoever was about
    to take it finds the file gone and makes it anew, and whoever had it before has its row, or will never have one.
    """
    free: dict[str, int] = {}
    try:
        names = os.listdir(directory)  # noqa: PTH208 (light)
    except OSError:  # somebody deletes the whole state directory
        return
    try:
        for name in names:
            handle = _locked(f"{os.fspath(directory)}/{name}")
            if handle is not None:
                free[name] = handle
        for name in free.keys() - set(rows()) if free else ():
            try:
                os.unlink(f"{os.fspath(directory)}/{name}")  # noqa: PTH108
            except OSError:
                continue  # another user's, or gone already
    finally:
        for handle in free.values():
            os.close(handle)


def _locked(path: str) -> int | None:
    """The file with a lock of ours on it; None where another has it, or there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
