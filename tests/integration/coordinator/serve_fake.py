"""`coordinator.server.run` with a fake pool, for tests of the process: lock, port, signals, exit status.

`python -m tests.integration.coordinator.serve_fake STATE_DIR HOST PORT [slow]`; with `slow`, the pool takes a minute
to start.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fastapi import FastAPI

from coordinator import server
from coordinator.app import assemble
from coordinator.broker import Broker, Parts
from coordinator.security import Gate
from coordinator.settings import Settings
from inference.proxy import EngineClient
from tests.integration.coordinator.support import FakePool, FakeRegistry, a_model


def main() -> int:
    state_dir, host, port, *how = sys.argv[1:]

    @asynccontextmanager
    async def open_pool() -> AsyncIterator[Any]:
        print("starting", flush=True)
        await asyncio.sleep(60 if "slow" in how else 0)
        pool = FakePool(
            FakeRegistry(a_model("robin")), EngineClient(Path("/nonexistent"), "k", name="robin"), holding=True
        )
        yield Parts(pool, None, None, pool)  # type: ignore[arg-type] # nobody asks for them
        print("pool ends", flush=True)
        while "patient" in how and pool.open_tickets:  # noqa: ASYNC110 (the fake tells nobody)
            await asyncio.sleep(0.01)
        print("pool ended", flush=True)

    def create_app(settings: Settings) -> FastAPI:
        broker = Broker(open_pool, log_dir=Path(state_dir))
        return assemble(broker, Gate(api_key=settings.api_key, host=settings.host, port=settings.port))

    with patch.object(server, "create_app", create_app):
        return server.run(Settings(state_dir=Path(state_dir), host=host, port=int(port)))


if __name__ == "__main__":
    sys.exit(main())
