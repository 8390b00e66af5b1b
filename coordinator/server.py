"""Runs the broker: one process, one event loop, one listening socket, one broker per state directory.

Called by `coordinator/cli` (`model-boss serve`). The order: may we listen there at all, is the address free, are we
alone on the state directory, does the pool start; then the ready line. Anything that stands in the way is one sentence
on standard error and exit status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from coordinator import logs
from coordinator.app import create_app
from coordinator.broker import Broker
from coordinator.listen import CannotListen, listen, url_of
from coordinator.security import UnsafeBind, check_bind
from coordinator.settings import Settings
from coordinator.wire import GuardedHttp
from gpuboss.errors import GpubossError, LockHeld
from gpuboss.state_dir import HostLock, StateDir
from inference.errors import InferenceError

BROKER_LOCK = "broker"
WHEN_TAKEN = "end that one, or give this one a directory of its own with --state-dir"
FAILED = 1
"""Exit status when the broker could not start; the reason stands on standard error."""
STOPPED = 130
"""Exit status when a signal ended it before it answered, or a second one did not let it finish."""
KEEP_ALIVE_S = 75
BEYOND_POOL_S = 5
"""Seconds that requests have beyond the pool's deadline (`shutdown_s`), by which it has told them all of the end."""

Ready = Callable[[str], None]
"""Called once with the broker's address when it answers."""


def run(settings: Settings, ready: Ready | None = None, *, when_taken: str = WHEN_TAKEN) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. `when_taken`: what to do where another broker is at work."""
    logs.configure(settings.log_level)
    try:
        check_bind(settings.host, loopback=settings.is_loopback, api_key=settings.api_key)
        with _alone_and_listening(settings) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listener, ready or _print_ready))
    except asyncio.CancelledError:
        return STOPPED
    except LockHeld as error:
        print(f"model-boss: {error}; {when_taken}", file=sys.stderr)
        return FAILED
    except (UnsafeBind, CannotListen, GpubossError, InferenceError) as error:
        print(f"model-boss: {error}", file=sys.stderr)
        return FAILED
    return 0


async def _serve(settings: Settings, listener: socket.socket, ready: Ready) -> None:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        http=GuardedHttp,
        ws="none",
        lifespan="off",  # run here instead: what it raises is for a person, not for uvicorn's log
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_s) + BEYOND_POOL_S,
    )
    server = _Server(config, app.state.broker, lambda: ready(url_of(listener)))
    server.obey_signals()
    async with app.router.lifespan_context(app):
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn, telling when it answers, and letting the pool know of the end at once.

    Otherwise the pool would hear of it after the last connection closed, and who waits in its queue would wait in vain.
    """

    def __init__(self, config: uvicorn.Config, broker: Broker, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._broker = broker
        self._ready = ready

    def obey_signals(self) -> None:
        """End on SIGTERM and SIGINT: in good order on the first, at once on a second and while still starting."""
        task = asyncio.current_task()
        assert task is not None, "signals are obeyed by a task"

        def stop() -> None:
            if not self.started or self.should_exit:
                for request in self.server_state.tasks:  # the pool would give them their time
                    request.cancel()
                task.cancel()
            self.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn's way raises them once more after they were obeyed."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let requests end, then stop."""
        self._broker.begin_shutdown()
        await super().shutdown(sockets)


@contextlib.contextmanager
def _alone_and_listening(settings: Settings) -> Iterator[socket.socket]:
    """The socket and the lock. A second broker is told so even where it would fail on the port."""
    state = StateDir.resolve(settings.state_dir)
    lock = HostLock(state.lock_path(BROKER_LOCK))
    try:
        listener = listen(settings.host, settings.port)
    except CannotListen:
        with lock:
            raise
    with contextlib.closing(listener):
        lock.note = url_of(listener)
        with lock:
            yield listener


def _print_ready(url: str) -> None:
    print(f"Model Boss is ready on {url}", flush=True)
