"""Inference: one JSON request in, an engine's answer out.

`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/rerank`, and `/tokenize`, `/detokenize`,
`/apply-template`. Called by `front.py`; reads the request with `request.py`, queues a ticket in `inference/pool.py`,
and passes the answer on with `streaming.py`. The engines speak these formats themselves, so bytes go through.
"""

from __future__ import annotations

import time

from coordinator import budget, request, streaming
from coordinator.broker import Broker
from coordinator.exchange import Answer, Exchange
from coordinator.hangup import HangUp
from inference.admission import Grant
from inference.errors import EngineDied
from inference.events import Purpose

ENGINE_HEADERS = ((b"content-type", b"application/json"),)
"""All an engine is told about the caller."""


class Infer:
    """The handler of one path."""

    def __init__(self, broker: Broker, path: str, purpose: Purpose) -> None:
        self._broker = broker
        self._path = path
        self._purpose = purpose

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request.

        Raises:
            CallerError, InferenceError, CallerGone
        """
        wanted = await request.understand(exchange, self._broker.pool.registry)
        with HangUp(exchange.receive):
            try:
                await self._attempt(exchange, wanted)
            except EngineDied as error:
                # It died between two requests, and this one was the first to notice: nothing happened to it yet.
                if error.reached or exchange.answer is not Answer.NONE:
                    raise
                await self._attempt(exchange, wanted)

    async def _attempt(self, exchange: Exchange, wanted: request.Wanted) -> None:
        pool, asked = self._broker.pool, wanted.extensions
        admission = pool.submit(
            wanted.model,
            priority=asked.priority,
            client_id=asked.client_id,
            stay_warm_s=asked.stay_warm_s,
            session_id=asked.session_id,
            cooldown_s=asked.cooldown_s,
            purpose=self._purpose,
        )
        try:
            grant = admission.grant_now()
            if grant is None:
                if wanted.stream:
                    grant = await streaming.wait_with_comments(exchange, admission)
                else:
                    grant = await admission.granted()
            await budget.spend(asked.budget_s, grant.model.id, self._forward(exchange, wanted, grant))
        finally:
            admission.close()

    async def _forward(self, exchange: Exchange, wanted: request.Wanted, grant: Grant) -> None:
        sent_s = time.monotonic()
        try:
            response = await grant.engine.open("POST", self._path, wanted.body, ENGINE_HEADERS)
        except EngineDied:
            await self._broker.pool.engine_over(grant)
            raise
        try:
            await streaming.relay(exchange, response, streaming.boss_headers(exchange.request_id, grant, sent_s))
        finally:
            response.close()
