"""All programs that we did not start and that the configuration names. Made by `coordinator/app.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from inference.external import External, ExternalView
from inference.external_spec import Spec
from inference.ledger import ExternalLedger

__all__ = ["Externals"]


class Externals:
    """Drives each of them by a task of its own."""

    def __init__(self, specs: Iterable[Spec], ledger: ExternalLedger) -> None:
        self._externals = [External(spec, ledger) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    def startup(self) -> None:
        """Begin to look after them."""
        self._tasks = [
            asyncio.create_task(external.main_loop(), name=f"external {external.spec.name}")
            for external in self._externals
        ]

    async def shutdown(self) -> None:
        """Look after them no more. They run on, under their leases."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def views(self) -> list[ExternalView]:
        """Each as it stands."""
        return [external.view() for external in self._externals]
