"""Reads what the processes of a crowd wrote, merged, and says which promise was broken. Standard library only.

Called by `tests.faults.crowd`. Each record has `op`; an operation has the moments `call` and `return`, by one clock.
Between a holder's `holds` and its `ends` it used its shares, whatever anybody else believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["check_crowd"]

Record = dict[str, Any]


def check_crowd(records: Iterable[Record], devices: Mapping[str, int]) -> tuple[Counter[str], list[str]]:
    """How often what was done, and what is wrong."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    grants: dict[tuple[int, int], str] = {}
    held: dict[str, Record] = {}
    changes: list[tuple[float, int, str, Mapping[str, int]]] = []
    seen: list[tuple[float, float, tuple[int, int], str]] = []
    for record in records:
        counts[record["op"]] += 1
        if record["op"] == "holds":
            fence = (record["epoch"], record["seq"])
            if grants.setdefault(fence, record["id"]) != record["id"]:
                faults.append(f"fence {fence} was given to {grants[fence]} and to {record['id']}")
            if record["id"] in held:
                faults.append(f"{record['id']} was granted twice")
            held[record["id"]] = record
            changes.append((record["at"], 1, record["id"], record["shares"]))
        elif record["op"] == "ends":
            changes.append((record["at"], 0, record["id"], held[record["id"]]["shares"]))
        elif record["op"] == "released" and record["state"] != "freed":
            faults.append(f"{record['id']} was released and is {record['state']}")
        elif record["op"] == "acquire" and record.get("state") == "granted":
            seen.append((record["call"], record["return"], tuple(record["fence"]), record["id"]))
    faults += _overlaps(changes, devices)
    faults += _falling_fences(seen)
    return counts, faults


def _overlaps(changes: list[tuple[float, int, str, Mapping[str, int]]], devices: Mapping[str, int]) -> list[str]:
    """Moments at which holders used more of a device than it has. At one moment, ends come before beginnings."""
    used: Counter[str] = Counter()
    faults = []
    for at, begins, lease_id, shares in sorted(changes, key=lambda change: change[:3]):
        for name, size in shares.items():
            used[name] += size if begins else -size
            if begins and used[name] > devices[name]:
                faults.append(f"{name} is oversubscribed at {at}: {lease_id} makes it {used[name]} of {devices[name]}")
    return faults


def _falling_fences(grants: list[tuple[float, float, tuple[int, int], str]]) -> list[str]:
    """Grants that were asked for after another was answered, and have a lower fence than it."""
    by_return = sorted(grants, key=lambda grant: grant[1])
    faults = []
    highest: tuple[tuple[int, int], str] = ((0, 0), "")
    position = 0
    for call, _, fence, lease_id in sorted(grants):
        while position < len(by_return) and by_return[position][1] < call:
            highest = max(highest, (by_return[position][2], by_return[position][3]))
            position += 1
        if fence < highest[0]:
            faults.append(f"{lease_id} got {fence} after {highest[1]} had {highest[0]}")
    return faults
