"""One process's standing connection to a ledger, for programs with an event loop of their own and without.

Called by `gpuboss.holding`, `gpuboss.held` and `gpuboss.looking`. A session is a `Client` in the event loop of one
daemon thread. It is made at first use, one per process and settings, and ends with the process; a forked child forgets
its parent's and makes its own. What is granted at once takes the short way: asked for and entered in the calling thread
(`gpuboss.direct`), without a word to the session's.
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
        self._requests: dict[Wish, tuple[LeaseRequest, Reply]] = {}
        """What was asked for before, and in which words, where it does not depend on what is free."""

    @property
    def lives(self) -> bool:
        """Whether it can be used."""
        return self._thread.is_alive()

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
        self._refuse_own_thread(coroutine)
        self._direct.settle()  # what was told before this is done before this
        ended = threading.Event()
        errand = _Errand(self._loop, coroutine, orphaned, ended.set)
        try:
            return asyncio.run_coroutine_threadsafe(errand.run(), self._loop).result()
        except BaseException:
            errand.abandon()
            ended.wait(_FAREWELL_S)
            raise

    async def follow(self, coroutine: Coroutine[Any, Any, _T], *, orphaned: Callable[[_T], object] | None = None) -> _T:
        """`run` for a task of another event loop. Cancelled, it cancels the coroutine and waits a second for it."""
        self._refuse_own_thread(coroutine)
        if self._direct.owes:
            await asyncio.to_thread(self._direct.settle)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        errand = _Errand(self._loop, coroutine, orphaned, lambda: loop.call_soon_threadsafe(ended.set))
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(errand.run(), self._loop))
        except asyncio.CancelledError:
            errand.abandon()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await ended.wait()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Do something in the session's loop; what it raises is logged, in case nobody asks."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
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
        frees the lease.
        """
        client = self.client
        client.stop_watching(lease.id)
        with contextlib.suppress(errors.GpubossError):  # the long way has more patience
            client.entries.leave(lease.id)
            if self._direct.tell(Script.RELEASE, fenced(lease), partial(self._give_back_later, lease)):
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

    def _give_back_later(self, lease: Lease) -> None:
        with contextlib.suppress(RuntimeError):  # the session has ended, and so does the process
            self.begin(taking.give_back(self.client, lease))

    # -- its end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up what is waited for, and end the thread."""
        if self._thread.is_alive():
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

    async def _serve(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        name = f"process {os.getpid()}"
        async with await Client.connect(self._settings, name=name, has_loop=True) as self.client:
            if self._opened.set_running_or_notify_cancel():
                self._opened.set_result(None)
                await self._leave.wait()

    def _refuse_own_thread(self, coroutine: Coroutine[Any, Any, object]) -> None:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a callback of the session cannot wait for the session: use a thread of your own")


class _Errand(Generic[_T]):
    """Something done in the session's loop for somebody who may stop waiting at any moment, also at the last."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, _T],
        orphaned: Callable[[_T], object] | None,
        ended: Callable[[], object],
    ) -> None:
        """`orphaned` gets a result that nobody waits for; `ended` is called in the session's loop in any case."""
        self._loop = loop
        self._coroutine = coroutine
        self._orphaned = orphaned
        self._ended = ended
        self._lock = threading.Lock()
        self._abandoned = False
        self._results: list[_T] = []
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> _T:
        """In the session's loop."""
        self._task = asyncio.current_task()
        try:
            if self._abandoned:
                self._coroutine.close()
                raise asyncio.CancelledError
            result = await self._coroutine
            with self._lock:
                self._results.append(result)
                abandoned = self._abandoned
            if abandoned:
                self._give_away()
            return result
        finally:
            with contextlib.suppress(RuntimeError):  # the loop of whoever waits was closed meanwhile
                self._ended()

    def abandon(self) -> None:
        """By whoever waited."""
        with self._lock:
            self._abandoned = True
            is_there = bool(self._results)
        if is_there:
            self._give_away()
        else:
            # Not by its future: that would be done with at once, whatever becomes of the task.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _give_away(self) -> None:
        if self._orphaned is not None and self._results:
            self._orphaned(self._results.pop())


class _Sessions:
    """All sessions of this process; replaced by a new one in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_key: dict[object, Session] = {}


_sessions = _Sessions()
_parents: list[_Sessions] = []
"""What a forked child inherited: never used, and kept, for their end would reach into the parent's."""


def session_for(settings: LedgerSettings | None) -> Session:
    """The session of this process for these settings; those of the environment by default. Connects at first use.

    Raises what `Client.connect` raises.
    """
    environ = os.environ
    state_dir = environ.get(STATE_DIR_VARIABLE)
    key: object = (settings, state_dir)
    if settings is None:
        key = (state_dir, environ.get(DEVICES_VARIABLE), environ.get(STORE_VARIABLE))
    session = _sessions.by_key.get(key)
    if session is None or not session.lives:
        with _sessions.lock:
            session = _sessions.by_key.get(key)
            if session is None or not session.lives:
                session = Session(settings or LedgerSettings.from_environment())
                session.open()
                _sessions.by_key[key] = session
    return session


def close_all() -> None:
    """End this process's sessions; the next use makes new ones. Done by itself when the process ends."""
    while _sessions.by_key:
        _, session = _sessions.by_key.popitem()
        session.close()


def _after_fork_in_child() -> None:
    global _sessions
    inherited, _sessions = _sessions, _Sessions()
    _parents.append(inherited)
    for session in inherited.by_key.values():
        session.let_go()


def _log_failure(future: concurrent.futures.Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.warning("%s", error)


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
