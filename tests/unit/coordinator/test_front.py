"""The front's last word when the server gives up on a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.exchange import Exchange
from coordinator.front import Front, RawRoutes
from coordinator.security import Gate

SCOPE = {"type": "http", "method": "POST", "path": "/x", "query_string": b"", "headers": [(b"host", b"localhost")]}


async def _never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_request_that_is_cancelled_ends_whether_its_caller_reads_or_not(reads: bool) -> None:
    """Otherwise a caller who does not read would keep the whole process from ending."""
    began = asyncio.Event()
    sent: list[bytes] = []

    async def handler(exchange: Exchange) -> None:
        await exchange.begin(200, [], events=True)
        began.set()
        await _never()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if not reads:
                await _never()
            sent.append(message["body"])

    gate = Gate(api_key=None, host="127.0.0.1", port=1)
    front = Front(_never, gate=gate, routes=RawRoutes({"/x": {"POST": handler}}, {}))
    request = asyncio.ensure_future(front(SCOPE, _never, send))
    await began.wait()
    request.cancel()
    await asyncio.wait_for(request, 5)
    assert any(b"shutting_down" in body for body in sent) is reads
