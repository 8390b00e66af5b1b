"""What an outsider sees of one broker: its engines, the rows of the node ledger, the leases in the store.

Used by the tests that kill things. Nothing here asks the broker or the keeper: processes come from the system, rows
from the ledger's file, leases from the store's own keys.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpuboss.keys import PoolKeys
from gpuboss.state_dir import StateDir
from tests.acceptance.broker import Broker

EVERY_S = 0.02
NEWCOMER_S = 2.0
"""A process may still become an engine (fork, then exec) so long after it was first seen."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that stood for a while and should not have."""

    what: str
    whose: str
    """A lease's id, or a pid."""
    lasted_s: float


def alive(process: psutil.Process) -> bool:
    """Is it this very process still, and not only its remains?"""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Watch(threading.Thread):
    """Looks every 20 ms, and remembers how long anything stood that should not."""

    def __init__(self, subject: Broker, *, most_engines: int) -> None:
        super().__init__(daemon=True, name="watch")
        self.looks = 0
        self.most_at_once = 0
        """Engines alive at one moment."""
        self.over_budget: list[str] = []
        self._subject = subject
        self._most_engines = most_engines
        self._state = StateDir.resolve(subject.state_dir)
        self._store = redis.Redis(
            unix_socket_path=str(self._state.socket_path("store")),
            socket_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._books: sqlite3.Connection | None = None
        self._done = threading.Event()
        self._others: dict[int, float] = {}
        """Pids that are no engines, and when they were first seen."""
        self._engines: dict[int, tuple[psutil.Process, str]] = {}
        """By pid: the process and its lease's id."""
        self._lives: dict[psutil.Process, tuple[int, float]] = {}
        """Every engine there was: its parent, and when it was last seen alive."""
        self._wrong: dict[tuple[str, str], float] = {}
        """What is wrong now, and since when."""
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

    def last_alive_s(self, pids: Collection[int]) -> float | None:
        """When an engine of these processes (it is one, or it is a child of one) was last seen alive; monotonic."""
        seen = [at_s for process, (parent, at_s) in list(self._lives.items()) if {process.pid, parent} & set(pids)]
        return max(seen, default=None)

    def standing(self) -> list[tuple[str, str]]:
        """What is wrong now, and whose."""
        return list(self._wrong)

    def _all(self) -> list[Wrong]:
        now_s = time.monotonic()
        standing = [Wrong(what, whose, now_s - since_s) for (what, whose), since_s in list(self._wrong.items())]
        return [*self._past, *standing]

    def _look(self) -> None:
        engines = self._living_engines()
        rows = self._rows()
        # Alive before and after the rows were read: so alive when they were.
        engines = {pid: lease for pid, lease in engines.items() if alive(self._engines[pid][0])}
        now_s = time.monotonic()
        for pid in engines:
            process, _ = self._engines[pid]
            self._lives[process] = (self._lives[process][0], now_s)
        leases = self._leases()
        self.looks += 1
        self.most_at_once = max(self.most_at_once, len(engines))
        if len(engines) > self._most_engines:
            self.over_budget.append(f"{len(engines)} engines live at once: {engines}")
        wrong = {("engine without a row", str(pid)) for pid, lease in engines.items() if lease not in rows}
        wrong |= {("row without a process", lease) for lease, pid in rows.items() if not _pid_alive(pid)}
        if leases is None:  # nobody can say; what was wrong with them stays so
            wrong |= {key for key in self._wrong if key[0] == "lease without a process"}
        else:
            wrong |= {
                ("lease without a process", lease)
                for lease, waits_for in leases.items()
                if not (lease in rows and _pid_alive(rows[lease])) and not (waits_for and _pid_alive(waits_for))
            }
        self._note(wrong)

    def _note(self, wrong: set[tuple[str, str]]) -> None:
        now_s = time.monotonic()
        for key in [key for key in self._wrong if key not in wrong]:
            self._past.append(Wrong(*key, now_s - self._wrong.pop(key)))
        for key in wrong:
            self._wrong.setdefault(key, now_s)

    def _living_engines(self) -> dict[int, str]:
        """Pid -> lease id."""
        pids, now_s = psutil.pids(), time.monotonic()
        for gone in set(self._others) - set(pids):
            del self._others[gone]
        for pid in pids:
            if pid in self._engines and alive(self._engines[pid][0]):
                continue
            if now_s - self._others.setdefault(pid, now_s) < NEWCOMER_S:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    self._classify(psutil.Process(pid))
        self._engines = {pid: known for pid, known in self._engines.items() if alive(known[0])}
        return {pid: lease for pid, (_, lease) in self._engines.items()}

    def _classify(self, process: psutil.Process) -> None:
        command = process.cmdline()
        if command and Path(command[0]) == self._subject.engine:
            environment = process.environ()
            if str(self._subject.directory) in environment.get("HOME", ""):
                self._engines[process.pid] = (process, environment["GPUBOSS_LEASE"])
                self._lives[process] = (process.ppid(), time.monotonic())
                del self._others[process.pid]

    def _rows(self) -> dict[str, int]:
        """Lease id -> the holder's pid."""
        try:
            if self._books is None:
                self._books = sqlite3.connect(f"file:{self._state.ledger_path}?mode=ro", uri=True, timeout=5.0)
            return dict(self._books.execute("SELECT lease_id, pid FROM holder"))
        except sqlite3.OperationalError:  # not made yet
            return {}

    def _leases(self) -> dict[str, int | None] | None:
        """Lease id -> for one that waits the pid of its asker, else None. None: the store does not answer."""
        keys = PoolKeys()
        _, _, queue, held, *_ = keys.keys()
        try:
            ids = [*self._store.smembers(held), *(str(member)[16:] for member in self._store.zrange(queue, 0, -1))]
            found = [self._store.hmget(keys.lease_prefix + lease, "state", "owner") for lease in ids]
        except redis.RedisError:
            return None
        return {
            lease: json.loads(owner)["pid"] if state == "queued" else None
            for lease, (state, owner) in zip(ids, found, strict=True)
            if state not in (None, "freed", "cancelled", "refused")
        }


def _pid_alive(pid: int) -> bool:
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
