"""What a shim does that only the operating system understands: become an engine, adopt descendants, list children.

Called by `shim.py` alone, and like it light and of the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LINUX = sys.platform == "linux"
OOM_SCORE = 500
"""Where memory runs out the kernel shall take the engine, which can be loaded again, not the broker or the store."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def become_engine(order: dict[str, Any], shim: int) -> None:
    """In the forked child: be a process that ends with the shim, knows nothing of it, and execute the engine."""
    os.setsid()
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:  # it died before the request to die with it was made
            os._exit(127)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 (no pathlib here)
            score.write(str(OOM_SCORE))
    signal.set_wakeup_fd(-1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's choice, which would be inherited
        signal.signal(ignored, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.umask(0o077)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), _STDIN)
    os.dup2(log, _STDOUT)
    os.dup2(log, _STDERR)
    os.chdir(order["cwd"])
    os.execve(order["argv"][0], order["argv"], order["env"])  # noqa: S606 (no shell is wanted)


def living_children() -> list[int]:
    """Pids of our living children; empty where there is no /proc."""
    if not LINUX:
        return []
    own = str(os.getpid())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (no pathlib here)
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if parent == own and state not in "ZX":
                found.append(int(name))
    return found


def adopt_descendants() -> None:
    """Be the parent of every descendant that loses its own; Linux alone can."""
    if LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # here: Linux alone

    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number or errno.EPERM, os.strerror(number))
