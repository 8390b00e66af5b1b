"""Commands to a history's store, each entered into the trace as it was sent and as it was answered.

Used by `tests.faults.world` and by whoever plays something smaller (`fairness`, `storms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpuboss.scripts import Script
from tests.faults.store import START_MS, TTL_MS, VirtualStore

__all__ = ["Recorder"]

Json = dict[str, Any]


class Recorder:
    """A store, a trace, and clocks."""

    def __init__(self, store: VirtualStore, see: Callable[[Json], None], *, calm: bool) -> None:
        self.store = store
        self.see = see
        """Takes the trace, record by record."""
        self.mono_ms = 0
        """A clock that never jumps."""
        self._noticed: set[str] = set()
        """Leases that the store's stream ever said must yield: for whom is looked up after every command. After a
        roll-back some of them must again."""
        see({"t": "begin", "calm": calm, "ttl_ms": TTL_MS, "now": START_MS})

    def wait(self, ms: int) -> None:
        """Time passes."""
        self.store.now_ms += ms
        self.mono_ms += ms

    def stopped(self, lease_id: str, why: str, lingers: Iterable[str] = ()) -> None:
        """A holder died."""
        self.see({"t": "stop", "lease": lease_id, "why": why, "mono": self.mono_ms, "lingers": list(lingers)})

    def deliver(self, script: Script, told: Json, *, life: int | None = None, heard: bool = True) -> Json:
        """The store does it; `life`: of the server that it was sent to."""
        store, noticed = self.store, self._noticed
        reply, events = store.run(script, told, life)
        about = dict.fromkeys(sorted(noticed))
        for event in events:
            if event["what"] in ("granted", "notice"):
                about[event["lease"]] = None
            if event["what"] == "notice":
                noticed.add(event["lease"])
        shown = store.server.leases(about) if about else {}
        self.see(
            {
                "t": "call",
                "script": script.value,
                "told": told,
                "reply": reply,
                "events": events,
                "leases": shown,
                "now": store.now_ms,
                "mono": self.mono_ms,
                "life": store.life,
                "sent": life or store.life,
                "heard": heard,
            }
        )
        return reply
