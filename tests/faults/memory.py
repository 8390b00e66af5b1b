"""Physical memory, as the checker models it: who began to use it occupies it until it really died. Standard library
only.

Used by `tests.faults.checker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.faults.books import Violation

__all__ = ["Memory"]


class Memory:
    """Every device of every node, and what holders that respect their claims occupy of it."""

    def __init__(self) -> None:
        self.caps: dict[str, int] = {}
        """Device -> what leases may use of it."""
        self.alive: set[str] = set()
        """Leases whose holders live."""
        self._admitted: dict[str, dict[str, int]] = {}
        """Lease -> what devices could give when its node let it in; one that gives less since then turns nobody out."""
        self._used: dict[str, dict[str, int]] = {}
        self._occupied: dict[str, int] = {}

    def enter(self, lease_id: str) -> None:
        """Its node lets a holder in."""
        self._admitted[lease_id] = dict(self.caps)

    def start(self, lease_id: str, uses: Mapping[str, int]) -> None:
        """A holder began; it must fit."""
        if lease_id in self._used:
            raise Violation(f"{lease_id} was started twice")
        self.alive.add(lease_id)
        self._used[lease_id] = {}
        self.use(lease_id, uses)

    def use(self, lease_id: str, uses: Mapping[str, int]) -> None:
        """A holder uses this much from now on; where that is more than before it must fit."""
        if lease_id not in self._used:
            return  # disowned
        before = self._used[lease_id]
        self._used[lease_id] = dict(uses)
        for name, size in uses.items():
            more = size - before.get(name, 0)
            self._occupied[name] = self._occupied.get(name, 0) + more
            limit = max(self.caps[name], self._admitted[lease_id][name])
            if more > 0 and self._occupied[name] > limit:
                raise Violation(
                    f"{name} is physically oversubscribed: {lease_id} uses {size} of it, "
                    f"all together {self._occupied[name]}, there are {limit}"
                )

    def stop(self, lease_id: str, lingers: Iterable[str] = ()) -> None:
        """A holder died. `lingers`: devices whose drivers have its memory still. Nothing for one that was disowned."""
        self.alive.discard(lease_id)
        for name in self._used.get(lease_id, {}).keys() - set(lingers):
            self.back(lease_id, name)

    def back(self, lease_id: str, name: str) -> None:
        """The memory of a dead holder on this device is there again."""
        uses = self._used.get(lease_id, {})
        self._occupied[name] -= uses.pop(name, 0)
        if not uses:
            self._used.pop(lease_id, None)

    def disown(self, lease_id: str) -> None:
        """Its lease is over by its own terms: what it still uses is foreign, and no promise covers that."""
        if lease_id in self.alive:
            self.stop(lease_id)
