"""uvicorn's HTTP protocol with limits on request heads and on callers who do not read. Used by `server.py`.

As it comes it reads headers of any size, and waits for ever for their end and for a caller to take the answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from coordinator import errors

HEAD_LIMIT_BYTES = 32 << 10
"""Largest request line with headers."""
HEADERS_LIMIT = 100
HEAD_DEADLINE_S = 10.0
"""Seconds from the first byte of a request (or the connection) to the end of its headers."""
READ_DEADLINE_S = 30.0
"""Seconds a caller may take to read what waits for them (64 KiB); until then they keep a place of their engine."""


class GuardedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._refusal: errors.CallerError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """A caller connected."""
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller or we closed the connection."""
        self._stop_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits to be read by the caller than is good."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_DEADLINE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The caller read on."""
        self._stop_read_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Bytes came: whatever of them belongs to an unfinished head is counted."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
            self._refusal = _too_large(self._head_bytes)
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """The parser saw the first byte of a request."""
        super().on_message_begin()
        if not self._in_head:
            self._start_head()

    def on_headers_complete(self) -> None:
        """The parser saw the end of the headers."""
        self._in_head = False
        self._stop_timer()
        # Most heads came in one piece with their body, and that is known to be small.
        if self._head_bytes > HEAD_LIMIT_BYTES or len(self.headers) > HEADERS_LIMIT:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > HEAD_LIMIT_BYTES or len(self.headers) > HEADERS_LIMIT:
                self._refusal = _too_large(size, len(self.headers))
                raise self._refusal  # the parser stops, and uvicorn answers with send_400_response
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, in the shape of every other error, and close."""
        refusal = self._refusal or errors.BadRequest(msg or "this is not a valid HTTP request")
        shown = errors.render(refusal)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(shown.body)
        self.transport.write(STATUS_LINE[shown.status] + head + shown.body)
        self.transport.close()

    def _start_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_DEADLINE_S, self._head_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _head_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _too_large(size: int, count: int = 0) -> errors.HeadersTooLarge:
    return errors.HeadersTooLarge(
        f"the request's headers are too large: {size} bytes in {count or 'unfinished'} headers; "
        f"the limits are {HEAD_LIMIT_BYTES} bytes and {HEADERS_LIMIT} headers"
    )
