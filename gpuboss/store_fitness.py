"""Whether a server may hold leases, and what its owner should know: judged from what its INFO says.

Called by `gpuboss.store`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuboss import errors

__all__ = ["refuse_eviction", "warnings"]

_OLDEST_MAJOR = 7


def refuse_eviction(facts: Mapping[str, str]) -> None:
    """StoreUnfit for a server that drops keys when its memory is full: a lease may not be dropped."""
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise errors.StoreUnfit(
            f"the lease store has maxmemory-policy {policy} and may drop leases when its memory is full: "
            "set `maxmemory-policy noeviction` there, or name another store with GPUBOSS_URL"
        )


def warnings(facts: Mapping[str, str], *, by_sentinel: bool) -> tuple[str, ...]:
    """What is not wrong, and should be otherwise."""
    found = []
    version = facts.get("redis_version", "")
    if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) < _OLDEST_MAJOR:
        found.append(f"the lease store is version {version}: nothing older than Redis {_OLDEST_MAJOR} is tested")
    replicated = by_sentinel or int(facts.get("connected_slaves", "0")) > 0
    if facts.get("aof_enabled") == "0":
        more = ", and a master that restarts empty empties its replicas" if replicated else ""
        found.append(
            f"the lease store keeps no append-only file (`appendonly yes`): it begins empty after a restart{more}. "
            "What runs is safe; who waits asks again"
        )
    if by_sentinel and "min_slaves_good_slaves" not in facts:  # said only where both settings are made
        found.append(
            "the lease store fails over by Sentinel, and its master takes writes without a replica: set "
            "`min-replicas-to-write 1` and `min-replicas-max-lag 10`, or a master that is cut off goes on granting "
            "what its successor does not know of"
        )
    return tuple(found)
