"""The first code a request meets: checks it, gives it an id, and sends it to its endpoint.

Installed by `app.py` as the outermost middleware. Endpoints on the way to an engine are raw handlers found by one
look-up here; everything else goes on to FastAPI. Errors of all of them are rendered here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import CallerError, MethodRefused, kind_of
from coordinator.exchange import Answer, Exchange
from coordinator.hangup import CallerGone
from coordinator.security import Gate, has_body
from gpuboss.errors import GpubossError
from inference.errors import InferenceError, ShuttingDown

Handler = Callable[[Exchange], Awaitable[None]]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RawRoutes:
    """The endpoints that bypass FastAPI."""

    exact: Mapping[str, Mapping[str, Handler]]
    """Path to method to handler."""
    prefixes: Mapping[str, Handler]
    """Path prefix to a handler that takes any method."""


class Front:
    """ASGI middleware; holds no state but a counter."""

    def __init__(self, app: ASGIApp, *, gate: Gate, routes: RawRoutes, access_log: bool = False) -> None:
        self._app = app
        self._gate = gate
        self._routes = routes
        self._access_log = access_log
        self._prefix = f"req-{secrets.token_hex(6)}-".encode()
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; other scopes pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, b"%b%x" % (self._prefix, next(self._numbers)))
        began_s = time.monotonic()
        try:
            self._gate.check(exchange)
            handler = self._find(exchange)
            if handler is not None:
                await handler(exchange)
            else:
                await self._app(scope, await _bounded(exchange), exchange.send_routed)
        except (CallerError, InferenceError, GpubossError) as error:
            await self._tell(exchange, error)
        except CallerGone:
            pass
        except asyncio.CancelledError:
            # The server cancels what outlives its grace. The task ends here; nobody waits for a caller to read that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await exchange.fail(ShuttingDown("the broker is shutting down and did not wait any longer"))
        except Exception as error:
            _log.exception("request_failed", path=exchange.path, request_id=exchange.request_id.decode())
            await exchange.fail(error)
        if self._access_log:
            self._log_access(exchange, time.monotonic() - began_s)

    def _find(self, exchange: Exchange) -> Handler | None:
        methods = self._routes.exact.get(exchange.path)
        if methods is not None:
            handler = methods.get(exchange.method)
            if handler is None:
                allow = ", ".join(methods)
                raise MethodRefused(f"{exchange.path} takes {allow}, not {exchange.method}", allow=allow)
            return handler
        for prefix, handler in self._routes.prefixes.items():
            if exchange.path.startswith(prefix):
                return handler
        return None

    async def _tell(self, exchange: Exchange, error: CallerError | InferenceError | GpubossError) -> None:
        kind = kind_of(error)
        if not kind.tell or exchange.answer is not Answer.NONE:
            _log.warning(
                "request_broken",
                path=exchange.path,
                request_id=exchange.request_id.decode(),
                code=kind.code,
                error=error.message,
            )
        await exchange.fail(error)

    def _log_access(self, exchange: Exchange, took_s: float) -> None:
        _log.debug(
            "request",
            method=exchange.method,
            path=exchange.path,
            status=exchange.status,
            took_ms=round(took_s * 1000, 1),
            request_id=exchange.request_id.decode(),
            whole=exchange.answer is Answer.DONE,
        )


async def _bounded(exchange: Exchange) -> Receive:
    """`receive` for the endpoints behind FastAPI, which would read bodies of any size for any time.

    Raises:
        BodyTooLarge, BodyTimeout, CallerGone
    """
    if not has_body(exchange.headers):
        return exchange.receive
    unread: list[Message] = [{"type": "http.request", "body": await exchange.body(), "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await exchange.receive()

    return receive
