"""This process's hand in the node ledger: enters holders there and takes them out, from whichever thread.

Called by `gpuboss.client` for every lease it activates or releases, and by `gpuboss.session` on its short way. Beside
the row of a lease that this very process holds stands a lock file, `holders/<lease>`, which proves to keepers in
another pid namespace that it lives; children that inherit it keep it alive.

A connection to the book belongs to one thread. All of this process's go through one gate, for two reasons: threads that
meet inside SQLite wait for each other in steps of milliseconds, and a fork in the middle of a transaction would leave
SQLite's own locks held in the child for ever. A signal handler that interrupts a thread in there finds the gate open,
for its own thread holds it, and a transaction half done: it must stay out (`interrupted`), and wait for no other
thread, which may be waiting for the gate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpuboss import errors
from gpuboss.holders import HolderLock
from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import terms_for, with_owner
from gpuboss.leases import Fence, Lease, Shares
from gpuboss.ledger_rows import Ground, LedgerRow, SharePeak
from gpuboss.node_ledger import NodeLedger
from gpuboss.state_dir import StateDir

__all__ = ["INTERRUPTED", "Entries", "is_inside"]

_T = TypeVar("_T")
_ORDERLY = (errors.ActivationRefused, errors.StaleFence)
"""The book's own answers: whoever gets one can go on with the same connection."""
_MOST_SPARE = 8
INTERRUPTED = (
    "called from a signal handler (or a finalizer) that interrupted gpuboss itself: set a flag there, "
    "and call gpuboss outside of it; lease.release() may be called anywhere"
)
"""Why something cannot be done now."""


class _Book:
    """One thread's connection to one book."""

    def __init__(self, path: str, gate: threading.RLock) -> None:
        self.ledger = NodeLedger(path)
        self._gate = gate
        self._thread = threading.get_ident()
        self._file = os.stat(path)  # noqa: PTH116 (on the way of every lease)

    def is_current(self) -> bool:
        """Whether the file is still the one that stands there: a state directory can be deleted and made anew."""
        try:
            return os.path.samestat(self._file, os.stat(self.ledger.path))  # noqa: PTH116
        except FileNotFoundError:
            return False

    def __del__(self) -> None:
        # The thread it belongs to ends. From another thread nobody may close it; it is closed all the same.
        # Through the gate: SQLite has locks of its own, and a child forked while this takes one would wait for ever.
        if not hasattr(self, "_file") or self._thread != threading.get_ident():
            return
        if sys.is_finalizing():  # a daemon thread may have been stopped for ever with the gate in hand
            self.ledger.close()
            return
        with self._gate:
            self.ledger.close()


class _Lock(HolderLock):
    """A lease's lock file, which may become another's."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._forks = _forks

    @property
    def is_ours_alone(self) -> bool:
        """Whether no child has been forked since: one would have inherited it, and keep the next lease alive too."""
        return self._forks == _forks

    def rename(self, path: str) -> bool:
        """Make it the file of another lease; False when it is gone."""
        try:
            os.rename(self.path, path)  # noqa: PTH104 (on the way of every lease)
        except OSError:
            return False
        self.path = path
        return True

    def discard(self) -> None:
        """Delete and close it. The keeper would, but between two of its beats there may be thousands."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108
        self.close()


class _Books:
    """All connections of this process; replaced by a new one in a forked child."""

    def __init__(self) -> None:
        self.gate = threading.RLock()
        self.of_thread = threading.local()


_forks = 0
"""How often this process has forked."""
_books = _Books()
_parents: list[_Books] = []
"""What a forked child inherited and must neither use nor close."""


def is_inside(lock: threading.RLock) -> bool:
    """Whether the calling thread holds it already."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001 (as `Condition` does)


class Entries:
    """The holders that this process has entered. For any thread."""

    def __init__(self, state: StateDir) -> None:
        self._path = os.fspath(state.ledger_path)
        self._holders_dir = os.fspath(state.holders_dir)
        self._locks: dict[str, _Lock] = {}
        self._spare: list[_Lock] = []
        """Locked files of leases that are over, to be renamed for the next: that costs a tenth of a new one."""
        self._entered: dict[str, Fence] = {}

    def enter(self, lease: Lease, process: ProcessIdentity | None, *, own: bool, adopts: Shares | None = None) -> None:
        """Enter a granted lease for the process that will use its memory; None: it is held by word alone.

        `own`: that process is this one. Repeating it changes nothing. Raises ActivationRefused, when the memory is not
        there, StaleFence, LedgerBusy, LedgerDamaged, StateDirError; then nothing is entered.
        """
        assert lease.fence is not None, "a granted lease has a fence"
        row = LedgerRow(
            lease.id,
            lease.fence.epoch,
            lease.fence.seq,
            lease.holder,
            lease.shares,
            pid=process.pid if process else None,
            start_ticks=process.start_ticks if process else None,
            pid_namespace=process.pid_namespace if process else None,
            terms=terms_for(lease),
        )
        is_new = lease.id not in self._entered
        # Noted before it is so: whoever is interrupted (Ctrl-C) in the middle must find it to take out again.
        self._entered[lease.id] = lease.fence
        try:
            if own:
                self.lock(lease.id)
            self._write(lambda ledger: ledger.admit(row, adopts))
        except errors.GpubossError:
            if is_new:
                self._entered.pop(lease.id, None)
                self.unlock(lease.id)
            raise

    def lock(self, lease_id: str, *, is_new: bool = False) -> None:
        """Take the lock file of a lease that this process will hold, before its row is entered. Raises LockHeld.

        A row whose file is missing would make its holder unknown for ever, one whose file is there and free dead.
        `is_new`: nobody else can have heard of this lease.
        """
        if lease_id in self._locks:
            return
        path = os.path.join(self._holders_dir, lease_id)  # noqa: PTH118 (on the way of every lease)
        spare = self._spare_for(path, is_new=is_new)
        if spare is not None:
            self._locks[lease_id] = spare
            return
        lock = self._locks[lease_id] = _Lock(path)
        try:
            lock.take()
        except errors.GpubossError:
            self._locks.pop(lease_id, None)
            raise

    def unlock(self, lease_id: str) -> None:
        """Give the file up again, if it was taken: the lease has no row."""
        lock = self._locks.pop(lease_id, None)
        if lock is None:
            return
        if lock.is_ours_alone and len(self._spare) < _MOST_SPARE:
            self._spare.append(lock)
        else:
            lock.discard()

    def _spare_for(self, path: str, *, is_new: bool) -> _Lock | None:
        """A locked file of this name: the one of a lease that was not granted at once, or another that becomes it."""
        for lock in list(self._spare):
            if not (is_new or lock.path == path):
                continue
            try:
                self._spare.remove(lock)
            except ValueError:  # another thread took it
                continue
            if lock.path == path or (lock.is_ours_alone and lock.rename(path)):
                return lock
            lock.discard()
        return None

    def leave(self, lease_id: str) -> bool:
        """Take a lease's row out again; False where this process entered none. Its memory may be others' from then."""
        fence = self._entered.get(lease_id)
        if fence is None:
            return False
        self._write(lambda ledger: ledger.remove(lease_id, fence.epoch, fence.seq))
        self._entered.pop(lease_id, None)
        self.unlock(lease_id)
        return True

    def resize(self, lease: Lease, shares: Shares) -> None:
        """Have a row, if there is one, claim these shares and tell the lease's terms as they are now.

        Raises ActivationRefused, when what grows is not there, StaleFence for a row with another fence.
        """
        fence = lease.fence
        assert fence is not None
        if self.has_row(lease):
            terms = terms_for(lease)
            self._write(lambda ledger: ledger.resize(lease.id, fence.epoch, fence.seq, shares, terms=terms))

    def take_over(self, lease_id: str, fence: Fence, owner: ProcessIdentity) -> None:
        """Have a row, whoever entered it, say that this process answers for its lease. StaleFence: no such row."""

        def change(ledger: NodeLedger) -> None:
            row = next((row for row in ledger.rows() if row.lease_id == lease_id), None)
            if row is None or (row.epoch, row.seq) != (fence.epoch, fence.seq):
                raise errors.StaleFence(f"lease {lease_id} has no row with {fence}: there is nothing to take over")
            terms = with_owner(row.terms, owner)
            ledger.resize(lease_id, fence.epoch, fence.seq, row.shares, terms=terms)

        self._write(change)

    def has_row(self, lease: Lease) -> bool:
        """Whether the book has this lease with this fence, whoever entered it."""
        fence = lease.fence
        rows = self._write(lambda ledger: ledger.rows())
        return fence is not None and any(
            (row.lease_id, row.epoch, row.seq) == (lease.id, fence.epoch, fence.seq) for row in rows
        )

    def grounds(self, lease_id: str) -> tuple[Ground, ...]:
        """What the admission of a lease's holder rested on; empty where it has no row."""
        return self._write(lambda ledger: ledger.grounds()).get(lease_id, ())

    def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        """By lease, the most that its holder was seen to use."""
        return self._write(lambda ledger: ledger.peaks())

    @property
    def interrupted(self) -> bool:
        """Whether the calling thread is in the books already, and a signal handler of it asks."""
        return is_inside(_books.gate)

    def close(self) -> None:
        """Close this thread's connection and give up spare files; the next use opens what it needs. Holders stay."""
        while self._spare:
            self._spare.pop().discard()
        with _books.gate:
            self._forget()

    def _write(self, act: Callable[[NodeLedger], _T]) -> _T:
        if self.interrupted:
            raise RuntimeError(INTERRUPTED)
        with _books.gate:
            book = self._book()
            try:
                return act(book.ledger)
            except _ORDERLY:
                raise
            except BaseException:
                # Also a Ctrl-C between the beginning of a transaction and its guard: the end of the connection ends it.
                self._forget()
                raise

    def _book(self) -> _Book:
        open_books: dict[str, _Book] = _books.of_thread.__dict__
        book = open_books.get(self._path)
        if book is None or not book.is_current():
            book = open_books[self._path] = _Book(self._path, _books.gate)
        return book

    def _forget(self) -> None:
        open_books: dict[str, _Book] = _books.of_thread.__dict__
        book = open_books.pop(self._path, None)
        if book is not None:
            book.ledger.close()


def _before_fork() -> None:
    global _forks
    _books.gate.acquire()
    _forks += 1


def _after_fork_in_parent() -> None:
    _books.gate.release()


def _after_fork_in_child() -> None:
    global _books
    _parents.append(_books)
    _books = _Books()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
