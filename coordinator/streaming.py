"""The way back: an engine's answer to the caller, and what a stream is told while it waits.

Called by `api/infer.py` and `api/passthrough.py`. Chunks are passed on as they come and never looked into.
"""

from __future__ import annotations

import asyncio
import math
import time

from coordinator import errors
from coordinator.exchange import JSON_HEADER, Answer, Exchange, Headers
from inference.admission import Admission, Grant, Progress
from inference.proxy import EngineResponse
from inference.slot_state import SlotState

COMMENT_EVERY_S = 1.0
"""A stream that waits this long gets its headers and a comment, then another each time it passes."""
MOST_COMMENTS = 50
"""In that time, to all who wait together: where more wait, each is told less often,"""
LONGEST_PAUSE = 10
"""but not less than once in so many times it, or proxies would take the stream for dead."""

_EVENT_STREAM = b"text/event-stream"
_STREAM_HEADERS: Headers = [
    (b"content-type", _EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]


async def wait_with_comments(exchange: Exchange, admission: Admission) -> Grant:
    """Wait for the grant; after a second the stream begins and comments say where it stands.

    Raises:
        InferenceError: the ticket was refused.
    """
    pause_s = COMMENT_EVERY_S
    while True:
        try:
            async with asyncio.timeout(pause_s):
                return await admission.granted()
        except TimeoutError:
            pass
        if exchange.answer is Answer.NONE:
            model = (b"x-boss-model", admission.ticket.model_id.encode())
            await exchange.begin(200, [(b"x-request-id", exchange.request_id), model, *_STREAM_HEADERS], events=True)
        progress = admission.progress()
        await exchange.write(comment(progress))
        pause_s = pause_between_comments_s(progress.waiting)


def pause_between_comments_s(waiting: int) -> float:
    """Seconds from one comment in a stream to the next, while so many wait."""
    return COMMENT_EVERY_S * min(max(1.0, waiting / MOST_COMMENTS), LONGEST_PAUSE)


def comment(progress: Progress) -> bytes:
    """`: queued 3 of 7, about 12 s`, `: loading 40%`: readers of server-sent events skip it, people and proxies see
    life."""
    about = b"" if progress.eta_s is None else b", about %d s" % max(1, math.ceil(progress.eta_s))
    if progress.state is not SlotState.LOADING:
        return b": queued %d of %d%b\n\n" % (progress.position, progress.waiting, about)
    if progress.load_fraction is None:
        return b": loading%b\n\n" % about
    return b": loading %d%%%b\n\n" % (int(progress.load_fraction * 100), about)


def boss_headers(request_id: bytes, grant: Grant, sent_s: float) -> Headers:
    """What every answer from an engine carries; `sent_s` is when the engine was asked, monotonic."""
    queue_ms, load_ms = grant.queue_s * 1000, grant.load_s * 1000
    engine_ms = (time.monotonic() - sent_s) * 1000
    return [
        (b"x-request-id", request_id),
        (b"x-boss-model", grant.model.id.encode()),
        (b"x-boss-slot", grant.slot_id.encode()),
        (b"x-boss-node", grant.node.encode()),
        (b"x-boss-queue-ms", b"%d" % queue_ms),
        (b"x-boss-load-ms", b"%d" % load_ms),
        (b"server-timing", b"queue;dur=%.1f, load;dur=%.1f, engine;dur=%.1f" % (queue_ms, load_ms, engine_ms)),
    ]


async def relay(exchange: Exchange, response: EngineResponse, boss: Headers) -> None:
    """Pass an inference answer on: events as they come, anything else whole.

    Raises:
        inference.errors.EngineDied: before or in the middle of the answer.
    """
    kind = content_type(response)
    if response.status == 200 and kind.startswith(_EVENT_STREAM):
        await _relay_events(exchange, response, boss)
        return
    body, headers = await response.read(), [*boss, (b"content-type", kind)]
    if response.status >= 400:
        body = errors.from_engine(response.status, body)
        headers.append(errors.DO_NOT_REPEAT)  # the engine is there and will not have it
    if exchange.answer is Answer.EVENTS:  # the headers left while the ticket waited
        await exchange.end(b"data: " + body.replace(b"\n", b" ") + b"\n\n")
        return
    await exchange.reply(response.status, headers, body)


async def relay_raw(exchange: Exchange, response: EngineResponse, boss: Headers) -> None:
    """Pass any answer on with its own headers, in pieces.

    Raises:
        inference.errors.EngineDied: before or in the middle of the answer.
    """
    kind = content_type(response)
    if kind.startswith(_EVENT_STREAM):
        await _relay_events(exchange, response, boss)
        return
    await exchange.begin(response.status, [*boss, *response.headers])
    async for chunk in response:
        await exchange.write(chunk)
    await exchange.end()


async def _relay_events(exchange: Exchange, response: EngineResponse, boss: Headers) -> None:
    """Headers wait for the first chunk, so that an engine that dies before it is still a proper error."""
    async for chunk in response:
        if exchange.answer is Answer.NONE:
            await exchange.begin(200, [*boss, *_STREAM_HEADERS], events=True)
        elif boss:
            await exchange.write(b"".join(b": %b: %b\n" % pair for pair in boss) + b"\n")
        boss = []
        await exchange.write(chunk)
    if exchange.answer is Answer.NONE:
        await exchange.begin(200, [*boss, *_STREAM_HEADERS], events=True)
    await exchange.end()


def content_type(response: EngineResponse) -> bytes:
    """The engine's Content-Type; JSON where it gives none."""
    for name, value in response.headers:
        if name == b"content-type":
            return value
    return JSON_HEADER[1]
