"""The device `cpu` inside a real control group with a limit: its size and what is free of it follow the group's."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboss.units import MIB

LIMIT = 512 * MIB
FILE = 128 * MIB
BLOCK = 64 * MIB

_PROGRAM = """
import json, mmap, os, sys
group, file, size = sys.argv[1:]
with open(group, "w") as group:
    group.write(str(os.getpid()))  # what is used from here on is the group's
from gpuboss.devices.cpu import CpuProbe

def look():
    (reading,) = CpuProbe().read([os.getpid()])
    told.append([reading.used_bytes, reading.by_pid[os.getpid()]])

told = [CpuProbe().devices()[0].total_bytes]
look()
with open(file, "wb") as opened:
    for _ in range(int(size)):
        opened.write(bytes(1 << 20))
    os.fsync(opened.fileno())  # pages that wait to be written are not free
for _ in range(4):  # so often that the kernel takes its pages for used lately
    with open(file, "rb") as opened:
        while opened.read(1 << 20):
            pass
look()
with open(file, "r+b") as opened:
    mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
assert sum(mapped[at] for at in range(0, len(mapped), 4096)) == 0
look()
block = bytearray(os.urandom(1 << 16)) * (64 << 4)
look()
print(json.dumps(told))
"""


def _own_group() -> tuple[Path, str] | None:
    """Our own memory group's folder and the name of its limit; None where there is none to be found."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{inside}"), "memory.limit_in_bytes"
        folder = Path(f"/sys/fs/cgroup{inside}")
        if not controllers and "memory" in _text(folder / "cgroup.subtree_control").split():
            return folder, "memory.max"
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """An empty control group with a limit, below our own."""
    found = _own_group() if sys.platform == "linux" else None
    if found is None:
        pytest.skip("no control group of memory is ours to divide here")
    made = found[0] / f"gpuboss-{tmp_path.parent.name}"
    try:
        made.mkdir()
        (made / found[1]).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    with contextlib.suppress(OSError):
        made.rmdir()


def test_the_groups_limit_is_the_devices_size_and_nothing_counts_twice(group: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    words = [sys.executable, "-c", _PROGRAM, str(group / "cgroup.procs"), str(file), str(FILE // MIB)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    total, (start, _), (read, _), (mapped, resident), (anonymous, _) = json.loads(done.stdout)
    assert total == LIMIT
    assert read - start < FILE / 4, "what is only cached is free"
    assert resident > FILE
    assert FILE <= mapped - start < FILE * 1.5, "mapped weights are used, once"
    assert BLOCK / 2 < anonymous - mapped < BLOCK * 1.5
