"""`model-boss serve` that tells what lives inside it: on SIGUSR1 it writes its tasks and objects to a file.

`python -m tests.acceptance.serve_and_tell FILE CONFIG`. Started by `storm.py`; the server itself is the real one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from coordinator import server
from coordinator.config_files import load_settings
from gpuboss.store_link import Link

WATCHED = frozenset({"Admission", "EngineResponse", "Exchange", "GuardedHttp", "HangUp", "RequestResponseCycle"})
"""Classes of which nothing may be left once all requests are over and their connections closed."""


def main() -> int:
    file, config = map(Path, sys.argv[1:])
    serve = server._serve

    def tell() -> None:
        gc.collect()
        alive = gc.get_objects()
        kinds = Counter(type(thing).__name__ for thing in alive)
        told = {
            "tasks": sorted(task.get_name() for task in asyncio.all_tasks()),
            "objects": {name: kinds[name] for name in WATCHED},
            "store_links": sum(type(thing) is Link for thing in alive),
        }
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(told))
        unfinished.rename(file)

    async def serve_and_tell(*arguments: Any) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
        await serve(*arguments)

    with patch.object(server, "_serve", serve_and_tell):
        return server.run(load_settings(config).settings)


if __name__ == "__main__":
    sys.exit(main())
