"""Where a ledger keeps its files on this host, and why it cannot when it cannot.

Called by whoever opens a ledger (client, keeper, command line) before anything else. The rules:

1. Which directory: the one asked for, else `GPUBOSS_STATE_DIR`, else `/var/lib/gpuboss` where it exists (shared by the
   group `gpuboss`), else the user's XDG state directory. Always `<machine-id>/` below it, so that a home directory that
   several machines mount, or an image that was cloned, keeps the machines apart.
2. It must be on a local disk: locks and shared memory do not work over a network.
3. It must be ours, writable, and not writable by everybody.
4. Unix sockets stand in it, or in a short private directory where the path would be too long for the system.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpuboss import host_lock, identity, mounts
from gpuboss.errors import StateDirError
from gpuboss.host_lock import HostLock

__all__ = ["STATE_DIR_VARIABLE", "HostLock", "StateDir"]

STATE_DIR_VARIABLE = "GPUBOSS_STATE_DIR"
SYSTEM_DIR = Path("/var/lib/gpuboss")
LONGEST_SOCKET_PATH = 99
"""Bytes. Linux takes 107, macOS 103; some room is left for what a server appends."""

_SHARED_MODE = 0o2770
_PRIVATE_MODE = 0o700
_HINT = f"set {STATE_DIR_VARIABLE} (or `state_dir` in the configuration) to a directory of your own on a local disk"


@dataclass(frozen=True, slots=True)
class StateDir:
    """The directories and files of one ledger on one host."""

    root: Path
    """`<state directory>/<machine-id>`; exists and can be written."""

    @classmethod
    def resolve(cls, explicit: str | os.PathLike[str] | None = None) -> StateDir:
        """Find, make and check the state directory; `explicit` comes before every other way to name it.

        Raises StateDirError, which names the path, its owner and mode, and the setting to change.
        """
        base = _base(explicit)
        root = base / identity.machine_id()
        mounts.refuse_network(root, _HINT)
        _make(base, root)
        _check(root)
        state = cls(root)
        for directory in (state.store_dir, state.log_dir, state.holders_dir, state.locks_dir):
            _make_directory(directory, shared=_is_shared(root))
        return state

    @property
    def is_shared(self) -> bool:
        """Whether a group shares it: then what is made here is for all its members to write."""
        return _is_shared(self.root)

    @property
    def ledger_path(self) -> Path:
        """The node ledger's file for this boot."""
        return self.root / f"node-{identity.boot_id()}.sqlite"

    @property
    def store_dir(self) -> Path:
        """What the private store writes."""
        return self.root / "store"

    @property
    def log_dir(self) -> Path:
        """Logs of the keeper, the store and the engines."""
        return self.root / "log"

    @property
    def holders_dir(self) -> Path:
        """One file per holder that cannot be recognised by its process."""
        return self.root / "holders"

    @property
    def locks_dir(self) -> Path:
        """Lock files."""
        return self.root / "locks"

    def lock_path(self, name: str) -> Path:
        """The file for the `HostLock` of this name."""
        return self.locks_dir / f"{name}.lock"

    def socket_path(self, name: str) -> Path:
        """Where the unix socket of this name stands; its directory exists and only we (or our group) may enter."""
        path = self.root / f"{name}.sock"
        if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
            return path
        return _short_directory(self.root, name) / f"{name}.sock"

    def open_for_all(self, path: Path, flags: int) -> int:
        """Open a file, made if need be, that every user of this directory may write. StateDirError names its owner."""
        try:
            handle = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
            status = os.fstat(handle)
            if self.is_shared and status.st_uid == os.geteuid() and status.st_mode & 0o060 != 0o060:
                os.fchmod(handle, 0o660)  # the umask took the group's right to write
        except OSError as error:
            raise _explained(path, error) from error
        return handle

    def forget_other_boots(self) -> None:
        """Delete the ledgers of earlier boots, whose holders ended with the boot. Called by the keeper at its start."""
        for path in self.root.glob("node-*.sqlite*"):
            if not path.name.startswith(self.ledger_path.name):
                path.unlink(missing_ok=True)


def _base(explicit: str | os.PathLike[str] | None) -> Path:
    """Rule 1, without the machine's directory."""
    named = explicit or os.environ.get(STATE_DIR_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    if SYSTEM_DIR.is_dir():
        return SYSTEM_DIR
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state_home.is_absolute():  # the specification says to ignore a relative one
        try:
            state_home = Path.home() / ".local" / "state"
        except RuntimeError as error:  # no HOME and no entry in the user database
            raise StateDirError(f"user {os.geteuid()} has no home directory: {_HINT}") from error
    return state_home / "gpuboss"


def _make(base: Path, root: Path) -> None:
    """Make the base (private) and the machine's directory, shared where the base is shared by a group."""
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explained(base, error) from error
    _make_directory(base, shared=False)
    _make_directory(root, shared=_is_shared(base))


def _make_directory(path: Path, *, shared: bool) -> None:
    try:
        path.mkdir(mode=_SHARED_MODE if shared else _PRIVATE_MODE)
        if shared:
            path.chmod(_SHARED_MODE)  # the umask took the group's right to write
    except FileExistsError:
        if not path.is_dir():
            raise StateDirError(f"{path} is not a directory: move it away, or {_HINT}") from None
    except OSError as error:
        raise _explained(path, error) from error


def _is_shared(path: Path) -> bool:
    """Whether a group shares the directory: its members write there, and what they make belongs to the group."""
    return path.stat().st_mode & 0o2020 == 0o2020


def _check(root: Path) -> None:
    """Rule 3, by writing: permissions, read-only mounts and quotas all show there and nowhere else."""
    status = root.stat()
    if status.st_mode & stat.S_IWOTH:
        raise StateDirError(f"{root} may be written by everybody ({_whose(root)}): `chmod o-w` it, or {_HINT}")
    if status.st_uid not in (os.geteuid(), 0) and not _is_shared(root):
        raise StateDirError(f"{root} belongs to another user ({_whose(root)}): {_HINT}")
    try:
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        raise _explained(root, error) from error


def _explained(path: Path, error: OSError) -> StateDirError:
    """Why a directory could not be made or written: what stands in the way, whose it is, and what to do."""
    there = next(parent for parent in (path, *path.parents) if _exists(parent))
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return StateDirError(f"{path} cannot be written, the disk (or your quota) is full: make room, or {_HINT}")
        case errno.EROFS:
            return StateDirError(f"{path} cannot be written, its file system is mounted read-only: {_HINT}")
        case errno.ENOTDIR:
            return StateDirError(f"{path} cannot be made, for part of it is a file: {_HINT}")
    group = "; join the group `gpuboss`" if SYSTEM_DIR in (path, *path.parents) else ""
    return StateDirError(
        f"{path} cannot be written by {host_lock.user_name(os.geteuid())} ({error.strerror}; {there}: {_whose(there)})"
        f"{group}; {_HINT}"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _whose(path: Path) -> str:
    return host_lock.whose(path)


def _short_directory(root: Path, name: str) -> Path:
    """Rule 4: a directory of ours with a short name made from the root, so that every process finds the same."""
    if _is_shared(root):  # its users could agree on no directory of which each is the owner
        raise StateDirError(
            f"{root} is too long a path for a socket that a group shares: set {STATE_DIR_VARIABLE} to a shorter"
        )
    digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir():
        candidate = runtime / f"gpuboss-{digest}"
        if len(os.fsencode(candidate / f"{name}.sock")) <= LONGEST_SOCKET_PATH:
            return _own_directory(candidate, root)
    return _own_directory(Path("/tmp") / f"gpuboss-{os.geteuid()}-{digest}", root)  # noqa: S108 (checked to be ours)


def _own_directory(path: Path, root: Path) -> Path:
    """Make it if it is not there, and refuse it if another user made it: /tmp is everybody's."""
    _make_directory(path, shared=False)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StateDirError(
            f"{root} is too long a path for a socket, and {path}, which would stand in for it, is not private "
            f"({_whose(path)}): delete it, or set {STATE_DIR_VARIABLE} to a shorter path"
        )
    return path
