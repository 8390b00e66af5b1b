"""The two questions a program that we did not start is asked over HTTP: are you busy, and will you free your memory?

Used by `external.py`. Plain HTTP to where the owner's configuration says, without proxies or redirects, in a thread.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from urllib.parse import urlsplit

from inference.external_spec import Call

__all__ = ["is_busy", "perform"]

ANSWER_S = 5.0
"""How long the program may take to answer."""
MOST_READ = 1 << 20
"""Bytes of an answer that are looked at."""


async def is_busy(call: Call) -> bool | None:
    """Whether the program works; None when it does not say (it does not answer, or not with JSON).

    Anywhere in its JSON a `true`, a number above 0, or a list with something in it means that it does: ComfyUI's /queue
    and /prompt, and counters of most others, read so.
    """
    try:
        status, body = await asyncio.to_thread(_send, call)
        return _says_yes(json.loads(body)) if status < 300 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None


async def perform(call: Call) -> str | None:
    """Send the request; None when it was taken, else what went wrong, in words."""
    try:
        status, _ = await asyncio.to_thread(_send, call)
    except (OSError, http.client.HTTPException) as error:
        return f"{call.method} {call.url} failed: {error or type(error).__name__}"
    return None if status < 300 else f"{call.method} {call.url} was answered with status {status}"


def _send(call: Call) -> tuple[int, bytes]:
    parts = urlsplit(call.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        target = parts.path or "/"
        headers = {"Content-Type": "application/json"} if call.body else {}
        connection.request(
            call.method, f"{target}?{parts.query}" if parts.query else target, call.body or None, headers
        )
        response = connection.getresponse()
        return response.status, response.read(MOST_READ)
    finally:
        connection.close()


def _says_yes(value: object) -> bool:
    match value:
        case bool():
            return value
        case int() | float():
            return value > 0
        case list():
            return bool(value)
        case dict():
            return any(_says_yes(inner) for inner in value.values())
        case _:
            return False
