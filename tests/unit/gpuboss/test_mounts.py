"""Which file systems a ledger may be on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuboss import mounts
from gpuboss.errors import StateDirError

PROC_MOUNTS = """\
proc /proc proc rw,nosuid 0 0
/dev/vda / ext4 rw,relatime 0 0
tmpfs /run tmpfs rw 0 0
filer:/home /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/local ext4 rw 0 0
me@box:/data /mnt/my\\040data fuse.sshfs rw 0 0
C:\\134 /mnt/c 9p rw 0 0
overlay /layered overlay rw 0 0
filer:/x /layered nfs rw 0 0
"""
MAC_MOUNTS = """\
/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled)
//me@nas._smb._tcp.local/share (x) on /Volumes/share (x) (smbfs, nodev, nosuid, mounted by me)
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/lib/gpuboss", "ext4", False),
        ("/home/robin/.local/state/gpuboss", "nfs4", True),
        ("/homework/gpuboss", "ext4", False),
        ("/home/local/gpuboss", "ext4", False),
        ("/mnt/my data/deep/er", "fuse.sshfs", True),
        ("/mnt/c/Users", "9p", True),
        ("/layered/x", "nfs", True),
        ("/run/user/0", "tmpfs", False),
    ],
)
def test_a_path_is_on_the_nearest_mount_and_a_later_one_hides_an_earlier(path: str, kind: str, network: bool) -> None:
    found = mounts.file_system(Path(path), mounts.parse_proc_mounts(PROC_MOUNTS))
    assert found == kind
    assert mounts.is_network(found) is network


def test_macs_are_read_by_what_mount_prints() -> None:
    table = mounts.parse_mount_command(MAC_MOUNTS)
    assert mounts.file_system(Path("/Users/me"), table) == "apfs"
    assert mounts.file_system(Path("/Volumes/share (x)/state"), table) == "smbfs"
    assert mounts.is_network("smbfs")


@pytest.mark.parametrize(
    "kind", ["nfs", "NFS4", "cifs", "smb3", "ceph", "fuse.sshfs", "fuse.glusterfs", "fuse.rclone", "lustre", "9p"]
)
def test_network_file_systems_are_known(kind: str) -> None:
    assert mounts.is_network(kind)


@pytest.mark.parametrize(
    "kind", ["", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs", "fuse.ntfs-3g", "fuseblk"]
)
def test_local_file_systems_are_let_through(kind: str) -> None:
    assert not mounts.is_network(kind)


def test_a_link_onto_the_network_is_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    monkeypatch.setattr(mounts, "_table", lambda: [("/", "ext4"), (str(tmp_path / "far"), "cifs")])
    with pytest.raises(StateDirError, match=r"near/x is on a network file system \(cifs\).*set SOMETHING"):
        mounts.refuse_network(tmp_path / "near" / "x", "set SOMETHING")
    mounts.refuse_network(tmp_path / "x", "set SOMETHING")


def test_the_real_table_of_this_machine_names_the_root() -> None:
    assert mounts.file_system(Path("/"), mounts._table())
