"""A box where jobs come and go: `gpuboss run`s and programs that use `gpuboss.hold`, and an outsider who watches them.

Used by `test_gpuboss_kills.py`. The watch asks neither the keeper nor the library: processes come from the system, rows
from the node ledger's file, leases from the store's own keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpuboss.host_lock import read_owner
from gpuboss.keys import PoolKeys
from gpuboss.state_dir import StateDir
from tests.acceptance.outside import EVERY_S, NEWCOMER_S, Wrong, alive
from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[2]
DEVICES = "sim0=100MiB,sim1=100MiB"
CAPACITY = 100 << 20
SIZE = "60MiB"
"""What everybody wants: two fit at once, the others wait."""

_HOLDER = """
import random, sys, time
import gpuboss

chance = random.Random(int(sys.argv[2]))
while True:
    with gpuboss.hold(sys.argv[1], job=f"holder-{sys.argv[2]}"):
        time.sleep(chance.uniform(0.02, 0.4))
    time.sleep(chance.uniform(0, 0.1))
"""
_COMMANDS = (
    "sleep {short}",
    "sleep {short}; exit 3",
    "setsid sleep 60 & sleep {short}",
    "setsid sh -c 'sleep 60; true' & exec sleep {short}",
)
"""Some leave processes behind, in sessions of their own."""
_STUBBORN = "setsid sh -c 'trap \"\" TERM; sleep 60; true' & sleep {short}"
_USUAL = (" waiting: position ", f" has {SIZE} of ", " is gone; starting it again")
_PROPER_CODES = {0, 3, -signal.SIGKILL}
"""What runs may end with: their command's code, or our kill. What happens to keeper or store does not show there."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the outsider saw at one moment."""

    rows: dict[str, tuple[int, int | None]]
    """Lease id -> pid of the holder and of its command."""
    leases: dict[str, tuple[str, int]] | None
    """Lease id -> state and pid of who asked; None: the store did not answer."""
    carriers: dict[int, str]
    """Pid -> lease that it carries."""


class Watch(threading.Thread):
    """Looks every 20 ms, and remembers how long anything stood that should not."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True, name="watch")
        self.looks = 0
        self.most_at_once = 0
        """Rows at one moment."""
        self.oversubscribed: list[str] = []
        self.first_row_s: dict[str, float] = {}
        """Lease id -> when its row was first seen, monotonic."""
        self.last: Look = Look({}, {}, {})
        self._directory = directory
        self._state = StateDir.resolve(directory)
        self._store = redis.Redis(
            unix_socket_path=str(self._state.socket_path("store")),
            socket_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._books: sqlite3.Connection | None = None
        self._done = threading.Event()
        self._others: dict[int, float] = {}
        """Pids that carry nothing, and when they were first seen."""
        self._carriers: dict[int, tuple[psutil.Process, str]] = {}
        self._wrong: dict[tuple[str, str], float] = {}
        self._past: list[Wrong] = []
        self._fault: BaseException | None = None

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
        self._store.close()
        if self._fault is not None:
            raise self._fault

    def run(self) -> None:
        try:
            while not self._done.wait(EVERY_S):
                self._look()
        except BaseException as error:  # told to whoever ends the watch
            self._fault = error
        finally:
            if self._books is not None:
                self._books.close()

    def worst_s(self, what: str) -> float:
        """The longest that anything of this kind stood, what stands now included."""
        return max((wrong.lasted_s for wrong in self._all() if wrong.what == what), default=0.0)

    def longer_than(self, limit_s: float) -> list[Wrong]:
        """What stood, or stands, longer than that."""
        return [wrong for wrong in self._all() if wrong.lasted_s > limit_s]

    def standing(self) -> list[tuple[str, str]]:
        """What is wrong now, and whose."""
        return list(self._wrong)

    def carriers_of(self, lease: str) -> list[int]:
        """Living processes that carry a lease."""
        return [pid for pid, (process, its) in list(self._carriers.items()) if its == lease and alive(process)]

    def granted_after(self, moment_s: float, known: set[str]) -> bool:
        """Whether somebody who was not there before that moment holds, or held, a lease since."""
        return any(at_s > moment_s for lease, at_s in list(self.first_row_s.items()) if lease not in known)

    def _all(self) -> list[Wrong]:
        now_s = time.monotonic()
        standing = [Wrong(what, whose, now_s - since_s) for (what, whose), since_s in list(self._wrong.items())]
        return [*self._past, *standing]

    def _look(self) -> None:
        before = self._living_carriers()
        rows = self._rows()
        # Alive before and after the rows were read: so alive when they were.
        carriers = {pid: lease for pid, lease in before.items() if alive(self._carriers[pid][0])}
        leases = self._leases()
        self.last = Look(rows, leases, carriers)
        self.looks += 1
        self.most_at_once = max(self.most_at_once, len(rows))
        now_s = time.monotonic()
        for lease in rows:
            self.first_row_s.setdefault(lease, now_s)
        living = {lease for lease, pids in rows.items() if any(pid is not None and _pid_alive(pid) for pid in pids)}
        carried = set(carriers.values())
        wrong = {("process without a row", f"{pid} of {lease}") for pid, lease in carriers.items() if lease not in rows}
        wrong |= {("row without a process", lease) for lease in rows.keys() - living - carried}
        wrong |= {("row without its holder", lease) for lease, (pid, _) in rows.items() if not _pid_alive(pid)}
        if leases is None:  # nobody can say; what was wrong with them stays so
            wrong |= {key for key in self._wrong if key[0] == "lease without a process"}
        else:
            wrong |= {
                ("lease without a process", lease)
                for lease, (_, asker) in leases.items()
                if lease not in living and not _pid_alive(asker)
            }
        for key in [key for key in self._wrong if key not in wrong]:
            self._past.append(Wrong(*key, now_s - self._wrong.pop(key)))
        for key in wrong:
            self._wrong.setdefault(key, now_s)

    def _living_carriers(self) -> dict[int, str]:
        pids, now_s = psutil.pids(), time.monotonic()
        for gone in set(self._others) - set(pids):
            del self._others[gone]
        for pid in pids:
            if pid in self._carriers and alive(self._carriers[pid][0]):
                continue
            if now_s - self._others.setdefault(pid, now_s) < NEWCOMER_S:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    self._classify(psutil.Process(pid))
        self._carriers = {pid: known for pid, known in self._carriers.items() if alive(known[0])}
        return {pid: lease for pid, (_, lease) in self._carriers.items()}

    def _classify(self, process: psutil.Process) -> None:
        environment = process.environ()
        if environment.get("GPUBOSS_STATE_DIR") == str(self._directory) and "GPUBOSS_LEASE" in environment:
            self._carriers[process.pid] = (process, environment["GPUBOSS_LEASE"])
            del self._others[process.pid]

    def _rows(self) -> dict[str, tuple[int, int | None]]:
        try:
            if self._books is None:
                self._books = sqlite3.connect(f"file:{self._state.ledger_path}?mode=ro", uri=True, timeout=5.0)
            found = self._books.execute(
                "SELECT s.device_id, sum(s.claimed_bytes) FROM share s GROUP BY s.device_id"
            ).fetchall()
            self.oversubscribed += [f"{size} bytes of {device}" for device, size in found if size > CAPACITY]
            rows = self._books.execute("SELECT lease_id, pid, engine_pid FROM holder").fetchall()
            return {lease: (pid, engine) for lease, pid, engine in rows}
        except sqlite3.OperationalError:  # not made yet
            return {}

    def _leases(self) -> dict[str, tuple[str, int]] | None:
        prefix = PoolKeys().lease_prefix
        base = prefix.removesuffix("lease:")
        try:
            waiting = [str(member).rpartition(":")[2] for member in self._store.zrange(f"{base}queue", 0, -1)]
            ids = [*self._store.smembers(f"{base}held"), *waiting]
            found = [self._store.hmget(prefix + lease, "state", "owner") for lease in ids]
        except redis.RedisError:
            return None
        return {
            lease: (state, int(json.loads(owner)["pid"]))
            for lease, (state, owner) in zip(ids, found, strict=True)
            if state not in (None, "freed", "cancelled", "refused")
        }


class Jobs:
    """Wrappers and holders that come back whenever one has ended."""

    def __init__(self, directory: Path, *, wrappers: int, holders: int, seed: int) -> None:
        self.directory = directory
        self.codes: list[int] = []
        """Of every `gpuboss run` that ended before `stop`."""
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._run_wrappers, daemon=True) for _ in range(wrappers)]
        self._threads += [threading.Thread(target=self._run_holder, args=(n,), daemon=True) for n in range(holders)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUBOSS_")}
        self._environment = kept | {
            "GPUBOSS_STATE_DIR": str(directory),
            "GPUBOSS_DEVICES": DEVICES,
            "PYTHONPATH": str(ROOT),
        }
        self._log = (directory / "said").open("ab")

    def __enter__(self) -> Jobs:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def stop(self) -> None:
        """Let nobody begin, and end those that run: wrappers by SIGTERM, holders by SIGKILL."""
        self._done.set()
        with self._lock:
            for process in self._running.values():
                process.terminate()
            for process in self._holders.values():
                process.kill()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a run has ended"

    def living(self, target: str) -> list[int]:
        """The processes of this kind that live now."""
        state = StateDir.resolve(self.directory)
        if target == "keeper":
            owner = read_owner(state.lock_path("keeper"))
            return [owner.pid] if owner.pid and owner.alive else []
        if target == "store":
            with contextlib.suppress(OSError, ValueError):
                pid = int(json.loads((state.root / "store.pid").read_text())["pid"])
                return [pid] if _pid_alive(pid) else []
            return []
        with self._lock:
            kind = self._running if target == "wrapper" else self._holders
            return [pid for pid, process in kind.items() if process.poll() is None]

    def said(self) -> str:
        """What wrappers and holders have written that is not said every day."""
        lines = (self.directory / "said").read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not any(words in line for words in _USUAL))

    def _run_wrappers(self) -> None:
        while not self._done.is_set():
            with self._lock:
                if self._done.is_set():
                    return
                process = self._start_wrapper()
                self._running[process.pid] = process
            code = process.wait()
            with self._lock:
                del self._running[process.pid]
                if not self._done.is_set():
                    self.codes.append(code)

    def _start_wrapper(self) -> subprocess.Popen[bytes]:
        template = _STUBBORN if self._chance.random() < 0.04 else self._chance.choice(_COMMANDS)
        command = template.format(short=f"{self._chance.uniform(0.02, 0.4):.2f}")
        words = [
            sys.executable,
            "-m",
            "gpuboss.cli",
            "run",
            "--vram",
            SIZE,
            "--name",
            "wrapped",
            "--",
            "sh",
            "-c",
            command,
        ]
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            start_new_session=True,
        )

    def _run_holder(self, number: int) -> None:
        while not self._done.is_set():
            with self._lock:
                if self._done.is_set():
                    return
                process = subprocess.Popen(
                    [sys.executable, "-c", _HOLDER, SIZE, str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env=self._environment,
                    start_new_session=True,
                )
                self._holders[process.pid] = process
            process.wait()
            with self._lock:
                del self._holders[process.pid]


@contextlib.contextmanager
def everything_gone(directory: Path) -> Iterator[None]:
    """Afterwards nothing of this ledger runs any more: keeper and store leave by themselves."""
    try:
        yield
        wait_until(lambda: not _processes_of(directory), f"keeper and store of {directory} to leave", timeout_s=30)
    finally:
        for process in _processes_of(directory):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def improper(codes: list[int]) -> set[int]:
    """Exit codes that neither a command nor a kill of ours explains."""
    return set(codes) - _PROPER_CODES


def _processes_of(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            named = str(directory) in " ".join(process.cmdline())
            if (named or process.environ().get("GPUBOSS_STATE_DIR") == str(directory)) and alive(process):
                found.append(process)
    return found


def _pid_alive(pid: int | None) -> bool:
    try:
        return pid is not None and alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
