"""Every key of the store, built here and nowhere else, under one hash tag: one pool lives in one cluster slot.

Called by `gpuboss.store`. The scripts get `keys()` as KEYS, in this order, and `lease_prefix` for the keys of single
leases.

    {gb:<pool>}:meta        hash    schema, run_id, epoch, seq, clock, seen, order     for ever
    {gb:<pool>}:nodes       hash    node -> JSON of its devices and its last sync      for ever
    {gb:<pool>}:queue       zset    priority -> <order>:<lease>                        shrinks as waiters leave
    {gb:<pool>}:held        set     leases that hold memory                            shrinks as leases end
    {gb:<pool>}:deadlines   zset    clock in ms -> lease                               shrinks as leases end
    {gb:<pool>}:events      stream  what happened to which lease                       about 10,000 entries
    {gb:<pool>}:details     hash    node -> JSON of what is only shown of its devices  for ever
    {gb:<pool>}:wants       zset    bytes a waiter needs at least -> <y|n>:<lease>     shrinks as waiters leave
    {gb:<pool>}:learned     hash    profile -> JSON of what its holders took           at most 512 profiles
    {gb:<pool>}:lease:<id>  hash    one lease                                          10 min after it is over
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_POOL", "PoolKeys"]

DEFAULT_POOL = "main"


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The keys of one pool."""

    pool: str = DEFAULT_POOL
    """Ledgers that share a store and a pool name are one ledger."""

    def __post_init__(self) -> None:
        """ValueError for a name that would break the hash tag."""
        if not self.pool or not self.pool.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"pool name {self.pool!r} must be letters, digits, '-' and '_'")

    @property
    def meta(self) -> str:
        """The store's own facts: schema, run id, epoch, clock."""
        return self._key("meta")

    @property
    def events(self) -> str:
        """The stream that wakes waiters."""
        return self._key("events")

    @property
    def lease_prefix(self) -> str:
        """What a lease's id is appended to."""
        return self._key("lease:")

    def keys(self) -> tuple[str, ...]:
        """KEYS of every script, in the order that `scripts/_common.lua` takes them."""
        return (
            self.meta,
            self._key("nodes"),
            self._key("queue"),
            self._key("held"),
            self._key("deadlines"),
            self.events,
            self._key("details"),
            self._key("wants"),
            self._key("learned"),
        )

    def _key(self, name: str) -> str:
        return f"{{gb:{self.pool}}}:{name}"
