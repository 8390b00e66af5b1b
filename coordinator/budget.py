"""Ends what takes an engine longer than its caller allows (`x_budget_s`).

Called by `api/infer.py` and `api/passthrough.py` around the time between a grant and the end of the answer: waiting and
loading are not the engine's work, and `queue.max_wait_s` bounds them. Cancelling the work closes the connection to the
engine, which stops generating.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from coordinator.errors import BudgetExceeded


async def spend(budget_s: float | None, model_id: str, work: Awaitable[None]) -> None:
    """Do the work in that many seconds; None: as many as it takes.

    Raises:
        BudgetExceeded: it was not done by then, and was given up.
    """
    if budget_s is None:
        await work
        return
    try:
        async with asyncio.timeout(budget_s) as deadline:
            await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise BudgetExceeded(
            f"the engine of '{model_id}' worked on this for {budget_s:g} s, all that x_budget_s allows, and was "
            "stopped: allow more, or ask for less with max_tokens",
            param="x_budget_s",
        ) from None
