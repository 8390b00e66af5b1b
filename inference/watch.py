"""Notice that manifests or model files changed, and reload the registry.

Started by `coordinator/broker.py` as a task of the running broker. A change applies to a model's next load; a file
that is broken now keeps its former version and is reported. Folders that did not exist at the start are not
watched.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable

from inference.registry import Changes, Registry

SETTLE_MS = 500
"""Changes closer together than this are one: a copy of many files, an editor that writes twice."""
STEP_MS = 200
"""How often its thread looks for more of them; it does so all the time."""

_ENDINGS = (".yaml", ".yml", ".gguf")


async def watch(registry: Registry, report: Callable[[Changes], None]) -> None:
    """Reload whenever a watched folder changes and `report` what is different; runs until it is cancelled.

    `report` is called in the event loop and only when something is different. Needs the package watchfiles.
    """
    folders = registry.watched()
    if not folders:
        await asyncio.Event().wait()  # nothing to watch: only cancellation ends this
    await asyncio.to_thread(importlib.import_module, "watchfiles")  # it takes a while, and requests may come already
    from watchfiles import awatch

    changes = awatch(
        *folders,
        # A new folder too: what is put into it at once comes before anybody watches it.
        watch_filter=lambda _, path: path.lower().endswith(_ENDINGS) or os.path.isdir(path),  # noqa: PTH112 (a text)
        debounce=SETTLE_MS,
        step=STEP_MS,
        ignore_permission_denied=True,
    )
    # What changed between the first look and now would otherwise go unnoticed until the next change. The watch begins
    # with the first wait for it, which therefore comes before that look.
    first = asyncio.ensure_future(anext(changes))
    try:
        await asyncio.sleep(0)
        _report(await asyncio.to_thread(registry.reload), report)
        await first
    finally:
        first.cancel()
        await asyncio.wait({first})
    _report(await asyncio.to_thread(registry.reload), report)
    async for _ in changes:
        _report(await asyncio.to_thread(registry.reload), report)


def _report(changes: Changes, report: Callable[[Changes], None]) -> None:
    if changes:
        report(changes)
