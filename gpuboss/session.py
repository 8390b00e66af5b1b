"""One process's standing connection to a ledger, for programs with an event loop of their own and without.

Called by `gpuboss.holding`, `gpuboss.held` and `gpuboss.looking`. A session is a `Client` in the event loop of one
daemon thread. It is made at first use, one per process and settings, and ends with the process; a forked child forgets
its parent's and makes its own. What is granted at once takes the short way: asked for and entered in the calling thread
(`gpuboss.direct`), without a word to the session's.

A signal handler may interrupt any of this, and call it anew. So nobody waits here with a lock of Python's in hand that
the session's thread may want (an `Event` or a `Future` has one while it begins to wait), and who is interrupted where a
second call cannot be served is told so (`INTERRUPTED`).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from gpuboss import errors, taking
from gpuboss.client import Client, refusal
from gpuboss.devices import DEVICES_VARIABLE
from gpuboss.direct import DirectStore, Reply
from gpuboss.entries import INTERRUPTED, is_inside
from gpuboss.lease_calls import fenced
from gpuboss.lease_wire import lease_from
from gpuboss.leases import Lease, LeaseRequest, LeaseState, new_request_id
from gpuboss.scripts import Script
from gpuboss.settings import STORE_VARIABLE, LedgerSettings
from gpuboss.state_dir import STATE_DIR_VARIABLE
from gpuboss.taking import Wish

__all__ = ["Session", "close_all", "session_for"]

_T = TypeVar("_T")
_FAREWELL_S = 1.0
"""How long a caller that is interrupted waits for what it asked for to be given up."""
_MOST_REQUESTS = 64
_END_S = 3.0
"""How long the process's end waits for a session's."""
_log = logging.getLogger(__name__)


class Session:
    """See the module. `session_for` makes one; its methods are for any thread but its own."""

    client: Client
    """Set by `open`; to be used in the session's loop, but for what says otherwise."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._loop: asyncio.AbstractEventLoop
        self._leave: asyncio.Event
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._live, name="gpuboss-session", daemon=True)
        self._direct: DirectStore
        self._pid = os.getpid()
        self.lives = True
        """Whether it can be used. Not asked of the thread: who is interrupted there makes CPython take it for ended."""
        self._errands: set[_Errand[Any]] = set()
        """What is to be done, or being done, in its loop."""
        self._requests: dict[Wish, tuple[LeaseRequest, Reply]] = {}
        """What was asked for before, and in which words, where it does not depend on what is free."""

    def open(self) -> None:
        """Connect. Raises what `Client.connect` raises."""
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._opened.cancel()  # interrupted: the thread ends once it is connected, or not
            raise
        self._direct = DirectStore(self.client.store_url, self.client.timings)

    def run(self, coroutine: Coroutine[Any, Any, _T], *, orphaned: Callable[[_T], object] | None = None) -> _T:
        """Do something in the session's loop, and wait for it.

        A caller that is interrupted (Ctrl-C) has it cancelled, and waits a second at most for that to be done. A result
        that comes all the same, and that nobody waits for, goes to `orphaned`.
        """
        self._refuse(coroutine)
        over = threading.Lock()
        over.acquire()
        errand = _Errand(self._loop, self._errands, coroutine, over.release, orphaned)
        try:
            self._direct.settle()  # what was told before this is done before this
            self._begin(errand)
            over.acquire()
            return errand.result()
        except BaseException:
            errand.abandon()
            if not errand.is_over:
                over.acquire(timeout=_FAREWELL_S)
            raise

    async def follow(self, coroutine: Coroutine[Any, Any, _T], *, orphaned: Callable[[_T], object] | None = None) -> _T:
        """`run` for a task of another event loop. Cancelled, it cancels the coroutine and waits a second for it."""
        self._refuse(coroutine)
        try:
            loop, over = asyncio.get_running_loop(), asyncio.Event()
        except RuntimeError:  # a task that is thrown away after its loop was closed
            coroutine.close()
            raise
        ended = partial(loop.call_soon_threadsafe, over.set)
        errand = _Errand(self._loop, self._errands, coroutine, ended, orphaned)
        try:
            if self._direct.owes:
                await asyncio.to_thread(self._direct.settle)
            self._begin(errand)
            await over.wait()
            return errand.result()
        except BaseException as error:
            errand.abandon()
            if isinstance(error, asyncio.CancelledError) and not errand.is_over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_FAREWELL_S):
                        await over.wait()
            raise

    def see_to(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Do something in the session's loop; what it raises is logged. Nothing where the session has ended."""
        self._begin(_Errand(self._loop, self._errands, coroutine))

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """As `see_to`, for who asks what became of it, or may cancel it."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise
        future.add_done_callback(_log_failure)
        return future

    def call_soon(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call something in the session's loop, soon."""
        with contextlib.suppress(RuntimeError):  # the session has ended, and so does the process
            self._loop.call_soon_threadsafe(act, *arguments)

    # -- the short way -------------------------------------------------------------------------------------------------

    def take_at_once(self, wish: Wish) -> tuple[LeaseRequest | None, Lease | None]:
        """What was asked for, and the lease if it was granted at once and this process is entered in the node's books.

        Without a lease, `taking.take` goes on from the request. Raises LeaseRefused, and what the books raise.
        """
        if self.client.entries.interrupted:
            raise RuntimeError(INTERRUPTED)
        request, words = self._request(wish)
        if request is None or wish.wait_s == 0:  # who will not wait must not join the queue
            return request, None
        try:
            return request, self._ask_at_once(request, words)
        except errors.LeaseRefused:
            raise
        except BaseException:
            # Interrupted, or the books failed, and nobody knows how far it got.
            self.run(taking.give_up(self.client, request.request_id))
            raise

    def give_back(self, lease: Lease) -> None:
        """Return a lease that this process holds. Raises what the books raise; where the store is away, the keeper
        frees the lease. Where a signal handler interrupted this thread in the books, it is returned later.
        """
        client = self.client
        client.stop_watching(lease.id)
        if client.entries.interrupted:
            self.see_to(taking.give_back(client, lease))
            return
        with contextlib.suppress(errors.GpubossError):  # the long way has more patience
            client.entries.leave(lease.id)
            if self._direct.tell(Script.RELEASE, fenced(lease), lambda: self.see_to(taking.give_back(client, lease))):
                if client.must_settle(lease.shares):
                    self.call_soon(client.ask_to_sweep)
                return
        self.run(taking.give_back(client, lease))

    def _request(self, wish: Wish) -> tuple[LeaseRequest | None, Reply]:
        """What to ask for, and in which words; None when that takes longer to find out. Raises LeaseRefused."""
        client = self.client
        made = self._requests.get(wish)
        if made is not None:
            request_id = new_request_id()
            return replace(made[0], request_id=request_id), made[1] | {"id": request_id}
        is_open = wish.is_open(client.devices)
        found = self._direct.call(Script.SNAPSHOT, {"node": client.node}) if is_open else None
        if is_open and found is None:
            return None, {}
        request = wish.request(client.devices, client.read_snapshot(found).devices if found else ())
        words = client.arguments_of(request)
        if not is_open:
            if len(self._requests) >= _MOST_REQUESTS:
                self._requests.clear()
            self._requests[wish] = request, words
        return request, words

    def _ask_at_once(self, request: LeaseRequest, words: Reply) -> Lease | None:
        client, entries = self.client, self.client.entries
        lock = partial(entries.lock, request.request_id, is_new=True)
        reply = self._direct.call(Script.ACQUIRE, words, meanwhile=lock)
        if reply is not None and reply["status"] == "refused":
            entries.unlock(request.request_id)
            raise refusal(request, reply)
        lease = None if reply is None else lease_from(reply["lease"])
        if lease is not None and lease.state is LeaseState.GRANTED:
            with contextlib.suppress(errors.ActivationRefused):
                entries.enter(lease, client.owner, own=True)
                return lease
        entries.unlock(request.request_id)
        return None

    # -- its end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up what is waited for, and end the thread."""
        if self.lives:
            self._direct.settle()
            self.call_soon(self._leave.set)
            self._thread.join(_END_S)
        self._direct.close()

    def let_go(self) -> None:
        """In a forked child: let go of what is shared with the parent, and touch nothing else.

        An event loop's selector is shared, and what the child would take out of it would be out of the parent's; the
        keeper would not see the parent's end while a child holds its connection.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        keeper = self.client.fileno() if self._opened.done() and hasattr(self, "client") else -1
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, self._selector.fileno(), inheritable=False)
        if keeper >= 0:
            os.dup2(null, keeper, inheritable=False)
        os.close(null)

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._opened.done():
                _log.exception("the session of process %d failed", os.getpid())
            else:
                self._opened.set_exception(error)
        finally:
            self.lives = False
            for errand in list(self._errands):
                errand.drop()

    async def _serve(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        name = f"process {os.getpid()}"
        async with await Client.connect(self._settings, name=name, has_loop=True) as self.client:
            if self._opened.set_running_or_notify_cancel():
                self._opened.set_result(None)
                await self._leave.wait()
                self.lives = False
                leaving = [task for errand in list(self._errands) if (task := errand.leave()) is not None]
                if leaving:
                    await asyncio.wait(leaving, timeout=_FAREWELL_S)

    def _begin(self, errand: _Errand[Any]) -> None:
        """From any thread. It is over at once where the session has ended."""
        self._errands.add(errand)
        try:
            self._loop.call_soon_threadsafe(self._begin_now, errand)
        except RuntimeError:
            errand.drop()

    def _begin_now(self, errand: _Errand[Any]) -> None:
        if self.lives:
            errand.begin()
        else:
            errand.drop()

    def _refuse(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Raise RuntimeError where waiting for the session would be for ever."""
        if threading.current_thread() is self._thread:
            why = "a callback of the session cannot wait for the session: use a thread of your own"
        elif self._pid != os.getpid():
            why = f"it is held by process {self._pid}, and this is a forked child of it: call gpuboss.hold in the child"
        elif self.client.entries.interrupted:
            why = INTERRUPTED
        else:
            return
        coroutine.close()
        raise RuntimeError(why)


class _Errand(Generic[_T]):
    """Something done in the session's loop for somebody who may stop waiting at any moment, also at the last."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        errands: set[_Errand[Any]],
        coroutine: Coroutine[Any, Any, _T],
        ended: Callable[[], object] | None = None,
        orphaned: Callable[[_T], object] | None = None,
    ) -> None:
        """`ended` is called in any case, mostly in the session's loop; None: nobody waits, and what it raises is
        logged. `orphaned` gets a result that nobody waits for any more.
        """
        self._loop = loop
        self._all = errands
        self._coroutine = coroutine
        self._ended = ended
        self._orphaned = orphaned
        self._abandoned = False
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self._begun: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self.is_over = False

    def result(self) -> _T:
        """When it is over: what it gave, or raised. RuntimeError when the session ended before."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback leads to this frame
        if not self._results:
            raise _end_of_session()
        return self._results[0]

    def abandon(self) -> None:
        """By whoever waited."""
        self._abandoned = True
        if self._results:
            self._give_away()
        elif not self.is_over:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)

    def drop(self) -> None:
        """The session has ended, or nobody waits for what was not begun."""
        if not self.is_over:
            self._coroutine.close()
            self._end()

    # In the session's loop.

    def begin(self) -> None:
        """Begin it, unless it was dropped meanwhile."""
        if not self.is_over:
            self._begun = self._loop.create_task(self._run())

    def leave(self) -> asyncio.Task[None] | None:
        """The session is about to end: what it does now, if anything. It gives up what is waited for."""
        if self._ended is not None:
            self._abandoned = True
            self._cancel()
        return self._begun

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        try:
            if self._abandoned:
                self._coroutine.close()
            else:
                self._results.append(await self._coroutine)
                if self._abandoned:  # seen here, or the result is seen by who abandons it
                    self._give_away()
        except asyncio.CancelledError:
            pass  # abandoned, or the end of the session
        except BaseException as error:
            self._error = error
        finally:
            self._end()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif self._begun is None:
            self.drop()

    def _end(self) -> None:
        self.is_over = True
        self._all.discard(self)
        if self._ended is None:
            _log_error(self._error)
            return
        with contextlib.suppress(RuntimeError):  # the loop of whoever waits was closed meanwhile
            self._ended()

    def _give_away(self) -> None:
        try:
            result = self._results.pop()
        except IndexError:  # the other one has
            return
        if self._orphaned is not None:
            self._orphaned(result)


class _Sessions:
    """All sessions of this process; replaced by a new one in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_key: dict[object, Session] = {}


_sessions = _Sessions()
_is_ending = False
"""Whether this process ends."""
_parents: list[_Sessions] = []
"""What a forked child inherited: never used, and kept, for their end would reach into the parent's."""


def session_for(settings: LedgerSettings | None) -> Session:
    """The session of this process for these settings; those of the environment by default. Connects at first use.

    Raises what `Client.connect` raises, and RuntimeError in a signal handler that interrupts just that.
    """
    environ = os.environ
    state_dir = environ.get(STATE_DIR_VARIABLE)
    key: object = (settings, state_dir)
    if settings is None:
        key = (state_dir, environ.get(DEVICES_VARIABLE), environ.get(STORE_VARIABLE))
    session = _sessions.by_key.get(key)
    if session is None or not session.lives:
        if is_inside(_sessions.lock):
            raise RuntimeError(INTERRUPTED)
        if _is_ending and threading.current_thread() is not threading.main_thread():
            raise _end_of_session()
        with _sessions.lock:
            session = _sessions.by_key.get(key)
            if session is None or not session.lives:
                session = Session(settings or LedgerSettings.from_environment())
                session.open()
                _sessions.by_key[key] = session
    return session


def close_all() -> None:
    """End this process's sessions; the next use makes new ones. Done by itself when the process ends.

    Who waits for a lease meanwhile gets RuntimeError.
    """
    while _sessions.by_key:
        _, session = _sessions.by_key.popitem()
        session.close()


def _after_fork_in_child() -> None:
    global _sessions
    inherited, _sessions = _sessions, _Sessions()
    _parents.append(inherited)
    for session in inherited.by_key.values():
        session.let_go()


def _end_of_session() -> BaseException:
    """For who waits for a session that ends. A daemon thread that outlives the program ends without a word."""
    if _is_ending and threading.current_thread() is not threading.main_thread():
        return SystemExit("the process ends")
    return RuntimeError("this process's session with the ledger was closed meanwhile")


def _log_failure(future: concurrent.futures.Future[Any]) -> None:
    if not future.cancelled():
        _log_error(future.exception())


def _log_error(error: BaseException | None) -> None:
    if error is not None:
        _log.warning("%s", error)


def _end_with_process() -> None:
    global _is_ending
    _is_ending = True
    close_all()


atexit.register(_end_with_process)
os.register_at_fork(after_in_child=_after_fork_in_child)
