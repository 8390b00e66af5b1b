"""Which file system a path is on, and whether that is one on which locks and shared memory work.

Called by `state_dir`. SQLite's write-ahead log and `flock` need a kernel that sees every user of the file, which no
network file system offers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpuboss.errors import StateDirError

_NETWORK_TYPES = frozenset(
    (
        *("9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "webdav"),
    )
)
_NETWORK_FUSE = (
    "sshfs",
    "ceph",
    "gluster",
    "s3fs",
    "goofys",
    "gcsfuse",
    "rclone",
    "davfs",
    "juicefs",
    "mountpoint-s3",
    "nfs",
    "smb",
)


def refuse_network(path: Path, hint: str) -> None:
    """Raise StateDirError, ending in `hint`, when `path` (which need not exist yet) is on a network file system."""
    kind = file_system(path, _table())
    if is_network(kind):
        raise StateDirError(f"{path} is on a network file system ({kind}), where locks cannot be trusted: {hint}")


def file_system(path: Path, table: list[tuple[str, str]]) -> str:
    """The type of the file system `path` is on, by a table of (mount point, type); "" when the table does not tell."""
    wanted = Path(os.path.realpath(path))
    best, kind = -1, ""
    for mount_point, mount_kind in table:
        # A later line hides an earlier one of the same mount point.
        if wanted.is_relative_to(mount_point) and len(mount_point) >= best:
            best, kind = len(mount_point), mount_kind
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system of this type is shared with other machines."""
    kind = kind.lower()
    return kind in _NETWORK_TYPES or (kind.startswith("fuse.") and any(name in kind for name in _NETWORK_FUSE))


def parse_proc_mounts(text: str) -> list[tuple[str, str]]:
    """(mount point, type) of every line of /proc/self/mounts."""
    table = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 3:
            table.append((_unescape(fields[1]), fields[2]))
    return table


def parse_mount_command(text: str) -> list[tuple[str, str]]:
    """(mount point, type) of every line `mount` prints on macOS: `/dev/disk3s1 on / (apfs, sealed, local)`."""
    table = []
    for line in text.splitlines():
        place, bracket, options = line.rpartition(" (")
        _, on, mount_point = place.partition(" on ")
        if bracket and on:
            table.append((mount_point, options.partition(",")[0].rstrip(")")))
    return table


def _table() -> list[tuple[str, str]]:
    if sys.platform == "linux":
        return parse_proc_mounts(Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape"))
    done = subprocess.run(["/sbin/mount"], capture_output=True, text=True, timeout=10, check=False)
    return parse_mount_command(done.stdout)


def _unescape(field: str) -> str:
    """Spaces, tabs, line ends and backslashes stand as octal numbers there."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
