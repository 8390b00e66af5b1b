"""RAM of a Linux host as /proc and the control groups tell it.

Called by `cpu`. Inside a container the machine's RAM is not what may be used: the tightest limit of the own control
group and of those above it is. Both versions of control groups are read. The own group is that of the keeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpuboss.errors import DeviceError

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes a number near 2^63 for "no limit"."""


class LinuxMemory:
    """Reads below `root`, which is "/" but in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def total_bytes(self) -> int:
        """The machine's RAM, or the tightest limit of the control groups we are in."""
        return min([self._meminfo()["MemTotal"], *(limit for limit, _ in self._groups())])

    def available_bytes(self) -> int:
        """The least that the machine and each control group could still give."""
        return min([self._meminfo()["MemAvailable"], *(max(0, limit - used) for limit, used in self._groups())])

    def resident(self, pid: int) -> tuple[int, int] | None:
        """(resident bytes, the part of them that is mapped files); None for a process that is gone or a zombie."""
        try:
            fields = _fields(self._root / "proc" / str(pid) / "status")
        except (FileNotFoundError, ProcessLookupError):
            return None
        if "VmRSS" not in fields:  # a zombie, or a thread of the kernel
            return None
        return fields["VmRSS"], fields.get("RssFile", 0)

    def _meminfo(self) -> dict[str, int]:
        path = self._root / "proc" / "meminfo"
        fields = _fields(path)
        for name in ("MemTotal", "MemAvailable"):
            if name not in fields:
                raise DeviceError(
                    f"{path} does not tell {name}: declare devices (GPUBOSS_DEVICES) to go on without measuring"
                )
        return fields

    def _groups(self) -> Iterator[tuple[int, int]]:
        """(limit, used) of the control groups that have a limit, from our own upwards."""
        for line in _text(self._root / "proc" / "self" / "cgroup").splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers == "":
                yield from self._walk(Path("sys/fs/cgroup"), inside, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                yield from self._walk(
                    *(Path("sys/fs/cgroup/memory"), inside),
                    *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
                )

    def _walk(self, mount: Path, inside: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[int, int]]:
        """`prefix` begins the names of those figures in which the groups below are contained."""
        # In a container the path may be the host's, of which only the end of it (our "/") is mounted here.
        own = Path(inside.lstrip("/"))
        for group in dict.fromkeys([own, *own.parents, Path()]):
            directory = self._root / mount / group
            bound = _text(directory / limit).strip()
            if not bound.isdigit() or int(bound) >= _UNLIMITED_BYTES:
                continue
            # Pages of files are given back on demand, also those used lately, as in MemAvailable. Weights that an
            # engine has mapped are among them; `CpuProbe` counts them as its own, and here they would count twice.
            statistics = _text(directory / "memory.stat")
            reclaimable = sum(_statistic(statistics, f"{prefix}{state}_file") for state in ("inactive", "active"))
            yield int(bound), max(0, int(_text(directory / usage).strip() or 0) - reclaimable)


def _fields(path: Path) -> dict[str, int]:
    """`VmRSS:   1234 kB` lines of a file, in bytes."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            found[name] = int(number) * 1024
    return found


def _statistic(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _text(path: Path) -> str:
    """A file's text; empty where there is none, for not every system has control groups."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
