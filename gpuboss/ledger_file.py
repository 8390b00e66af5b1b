"""The node ledger's file: how it is made, opened, and written in one transaction at a time.

Called by `node_ledger` alone; turns what SQLite says into errors that name the file and the remedy.
"""

from __future__ import annotations

import os
import sqlite3
import time

from gpuboss import errors

BUSY_TIMEOUT_S = 5.0
"""How long a transaction waits for another process's."""

_VERSION = 3
_SINCE_3 = """
CREATE TABLE ground (
    lease_id TEXT NOT NULL, device_id TEXT NOT NULL, free_bytes INTEGER NOT NULL, read_age_s REAL,
    after TEXT NOT NULL, after_age_s REAL, PRIMARY KEY (lease_id, device_id)
) WITHOUT ROWID;
CREATE TABLE stop (device_id TEXT PRIMARY KEY, holder TEXT NOT NULL, at_s REAL NOT NULL) WITHOUT ROWID;
"""
_SCHEMA = """
CREATE TABLE device (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, idx INTEGER NOT NULL, measured INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL, reserve_bytes INTEGER NOT NULL,
    foreign_bytes INTEGER NOT NULL DEFAULT 0, residual_bytes INTEGER NOT NULL DEFAULT 0,
    quarantined_bytes INTEGER NOT NULL DEFAULT 0, base_bytes INTEGER NOT NULL DEFAULT 0,
    per_process INTEGER NOT NULL DEFAULT 1, read_at_s REAL
) WITHOUT ROWID;
CREATE TABLE holder (
    lease_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, holder TEXT NOT NULL,
    pid INTEGER, start_ticks INTEGER, pid_namespace INTEGER, engine_pid INTEGER, engine_start_ticks INTEGER,
    since_s REAL NOT NULL, terms TEXT NOT NULL, admitted_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE share (
    lease_id TEXT NOT NULL, device_id TEXT NOT NULL, claimed_bytes INTEGER NOT NULL,
    observed_bytes INTEGER, peak_bytes INTEGER, PRIMARY KEY (lease_id, device_id)
) WITHOUT ROWID;
CREATE TABLE ended (
    id INTEGER PRIMARY KEY, device_id TEXT NOT NULL, holder TEXT NOT NULL, settling_bytes INTEGER NOT NULL,
    used_bytes INTEGER NOT NULL, floor_bytes INTEGER NOT NULL, since_s REAL NOT NULL
);
CREATE TABLE mark (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
_STEPS = {0: _SCHEMA + _SINCE_3, 2: _SINCE_3}
"""What a file of a version needs to be of this one: what runs under the books of an earlier release runs on."""


def open_file(path: str) -> sqlite3.Connection:
    """A connection to the ledger at `path`, made if it is not there; any number of processes may do so at once."""
    _make_private(path)
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise _explanation(path, error) from error
    try:
        # Memory does not outlive a power cut, and killed processes leave their written pages to the kernel.
        connection.execute("PRAGMA synchronous = OFF")
        _prepare(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError):
            raise _explanation(path, error) from error
        raise
    return connection


class Transaction:
    """Everything inside happens at once or not at all; with `write`, no other process writes meanwhile.

    A class and not a `contextlib` generator, which would cost each shim the import.
    """

    def __init__(self, connection: sqlite3.Connection, path: str, *, write: bool = True) -> None:
        self._connection = connection
        self._path = path
        self._begin = "BEGIN IMMEDIATE" if write else "BEGIN"

    def __enter__(self) -> None:
        try:
            self._connection.execute(self._begin)
        except sqlite3.OperationalError as error:
            raise _explanation(self._path, error) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self._connection.execute("COMMIT")
            except sqlite3.OperationalError as failure:
                error = failure
        if error is not None:
            if self._connection.in_transaction:  # SQLite ends it by itself after some errors, such as a full disk
                self._connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.ProgrammingError):
                raise _explanation(self._path, error) from error


def _explanation(path: str, error: sqlite3.DatabaseError) -> errors.GpubossError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of the number is detail
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return errors.LedgerBusy(f"{path} stayed locked by another process for {BUSY_TIMEOUT_S:g} s")
    if code == sqlite3.SQLITE_FULL:
        return errors.StateDirError(
            f"{path} cannot grow: its disk is full; make room, or set GPUBOSS_STATE_DIR to another disk"
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        return errors.StateDirError(
            f"{path} cannot be opened or written ({error}): see its owner and mode, or set GPUBOSS_STATE_DIR"
        )
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return errors.LedgerDamaged(
            f"{path} is not a ledger or is damaged ({error}): end what runs on this node, then delete it"
        )
    return errors.LedgerDamaged(f"{path}: {error}")


def _make_private(path: str) -> None:
    """Create the file for its owner (and the group that shares its directory), before SQLite makes it for all."""
    directory = os.path.dirname(path) or "."  # noqa: PTH120 (pathlib costs 15 ms of interpreter start)
    try:
        shared = os.stat(directory).st_mode & 0o2020 == 0o2020  # noqa: PTH116
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o660 if shared else 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise errors.StateDirError(
            f"{path} cannot be made ({error.strerror}): set GPUBOSS_STATE_DIR to another directory"
        ) from error
    if shared:
        os.fchmod(handle, 0o660)
    os.close(handle)


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    """See that the file is in WAL mode and has our tables, while others may be doing the same."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while (version := connection.execute("PRAGMA user_version").fetchone()[0]) in _STEPS:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            if (step := _STEPS.get(connection.execute("PRAGMA user_version").fetchone()[0])) is not None:
                for statement in filter(str.strip, step.split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself for the lock that a change of the journal mode needs.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if version != _VERSION:
        raise errors.LedgerDamaged(
            f"{path} was written by another version (its schema is {version}, this is {_VERSION}): "
            "end what runs on this node, then delete it"
        )
