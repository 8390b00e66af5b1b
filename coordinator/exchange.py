"""One HTTP request and its response, as the raw endpoints see them.

Made by `front.py` for every request; used by `api/infer.py` and `api/passthrough.py`, which speak ASGI directly because
the way from a caller to an engine is the one place where microseconds count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from enum import Enum, auto
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from coordinator import errors
from coordinator.hangup import CallerGone

Headers = list[tuple[bytes, bytes]]

BODY_LIMIT_BYTES = 4 << 20
"""Largest request body."""
BODY_DEADLINE_S = 10.0
"""Seconds a body may take to arrive, plus one per MiB that came."""

SLOWEST_READ_S = 30.0
"""Seconds a caller may take until it reads on."""

JSON_HEADER = (b"content-type", b"application/json")


class Answer(Enum):
    """How far the response is, for whoever has to report an error."""

    NONE = auto()
    """Nothing was sent."""
    EVENTS = auto()
    """A stream of server-sent events has begun: an error can be one more event."""
    BYTES = auto()
    """Something else has begun: an error can only cut the connection."""
    DONE = auto()
    """It was sent completely."""


class Exchange:
    """A request being answered. One task uses it."""

    __slots__ = (
        "_mid_event",
        "_send",
        "answer",
        "headers",
        "method",
        "path",
        "receive",
        "request_id",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: bytes) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.request_id = request_id
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.answer = Answer.NONE
        self.status = 0
        self._mid_event = False
        """Is an event half told?"""

    async def body(self) -> bytes:
        """The whole request body.

        Raises:
            BodyTooLarge, BodyTimeout, CallerGone
        """
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                message = await self.receive()
        except TimeoutError:
            raise errors.BodyTimeout(f"the request body did not begin to arrive in {BODY_DEADLINE_S:.0f} s") from None
        if message["type"] != "http.request":
            raise CallerGone
        if message.get("more_body"):
            return await self._long_body(message)
        body: bytes = message.get("body", b"")
        if len(body) > BODY_LIMIT_BYTES:
            raise _too_large(len(body))
        return body

    async def _long_body(self, message: MutableMapping[str, Any]) -> bytes:
        """A body that comes in pieces: bounded in size, and in time by what has come."""
        announced = self.headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > BODY_LIMIT_BYTES:
            raise _too_large(int(announced))
        body = bytearray(message.get("body", b""))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(BODY_DEADLINE_S) as deadline:
                while message.get("more_body"):
                    message = await self.receive()
                    if message["type"] != "http.request":
                        raise CallerGone
                    body += message.get("body", b"")
                    if len(body) > BODY_LIMIT_BYTES:
                        raise _too_large(len(body))
                    deadline.reschedule(began_s + BODY_DEADLINE_S + len(body) / (1 << 20))
        except TimeoutError:
            raise errors.BodyTimeout(
                f"the request body did not arrive in {loop.time() - began_s:.0f} s ({len(body)} bytes came)"
            ) from None
        return bytes(body)

    async def begin(self, status: int, headers: Headers, *, events: bool = False) -> None:
        """Send status and headers; `events` says that an error may later be told as one more event."""
        self.answer = Answer.EVENTS if events else Answer.BYTES
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; waits while the caller reads too slowly.

        Raises:
            CallerGone: it read nothing for `SLOWEST_READ_S`; an engine's place is not to be held by that.
        """
        self._mid_event = not chunk.endswith(b"\n\n")
        try:
            async with asyncio.timeout(SLOWEST_READ_S):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise CallerGone from None

    async def end(self, chunk: bytes = b"") -> None:
        """Send the last piece of the body."""
        self.answer = Answer.DONE
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response."""
        headers.append((b"content-length", b"%d" % len(body)))
        await self.begin(status, headers)
        await self.end(body)

    async def fail(self, error: BaseException) -> None:
        """Tell the caller of an error in the way that is still open; cuts nothing by itself."""
        match self.answer:
            case Answer.NONE:
                shown = errors.render(error)
                headers = [(b"x-request-id", self.request_id), JSON_HEADER, *shown.headers]
                await self.reply(shown.status, headers, shown.body)
            case Answer.EVENTS:
                # A blank line ends the event that broke, so that the error is an event of its own.
                await self.end((b"\n\n" if self._mid_event else b"") + errors.sse_event(error))
            case Answer.BYTES | Answer.DONE:
                pass  # the server cuts the connection of a response that is not complete

    async def send_routed(self, message: Message) -> None:
        """`send` for the endpoints behind FastAPI: adds the request id, keeps `answer` true."""
        if message["type"] == "http.response.start":
            self.answer = Answer.BYTES
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id)]
        elif not message.get("more_body"):
            self.answer = Answer.DONE
        await self._send(message)


def _too_large(size_bytes: int) -> errors.BodyTooLarge:
    return errors.BodyTooLarge(f"the request body has {size_bytes} bytes; the limit is {BODY_LIMIT_BYTES}")
