"""Who asks for leases in a fault history, and what each knows of its own.

Used by `tests.faults.holders` and `tests.faults.askers`.
"""

from __future__ import annotations

import json
from typing import Any

from tests.faults.nodes import Node, Row

__all__ = ["OVER", "Client", "Want"]

Json = dict[str, Any]
OVER = ("freed", "refused", "cancelled")


class Client:
    """One process that asks for leases."""

    def __init__(self, number: int, sort: str, node: Node) -> None:
        self.sort = sort
        self.node = node
        self.owner = json.dumps({"boot_id": node.boot, "pid": number, "pid_namespace": 0, "start_ticks": 0})
        self.wants: dict[str, Want] = {}


class Want:
    """One lease that somebody wants or holds."""

    def __init__(self, client: Client, told: Json) -> None:
        self.id: str = told["id"]
        self.client = client
        self.told = told
        """The arguments of its `acquire`."""
        self.view: Json | None = None
        """What its client heard of it last."""
        self.heard_ms = 0
        """When, on a clock that never jumps."""
        self.row: Row | None = None
        """Its row in the node's book, once it is entered."""
        self.holds = False
        """Its holder has begun to use memory."""

    @property
    def is_granted(self) -> bool:
        """Whether it may be entered, as far as its client knows."""
        return self.row is None and self.view is not None and self.view["state"] == "granted"

    @property
    def notice(self) -> Json | None:
        """What its client knows of a notice to yield."""
        found: Json | None = self.view.get("notice") if self.view else None
        return found

    def fence(self) -> Json:
        """For commands that need it."""
        assert self.row is not None
        epoch, seq = self.row.fence
        return {"id": self.id, "epoch": epoch, "seq": seq}
