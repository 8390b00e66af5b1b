"""A trace's records as people read them: one line each, memory in MiB, times without what they all begin with.

Used by `python -m tests.faults --seed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["readable"]

Json = Mapping[str, Any]
_MIB = 1 << 20
_DULL = {"holder", "owner", "node", "kind", "since_ms", "lease_ttl_ms", "grace_ms", "preemptible", "status", "lease"}
_LARGE = 1_000_000_000_000


def readable(record: Json) -> str:
    """One line."""
    if record["t"] != "call":
        return "  ".join([f"{record['t']:8}", *(f"{name}={_value(v)}" for name, v in record.items() if name != "t")])
    late = "" if record["sent"] == record["life"] else f" (sent in life {record['sent']})"
    heard = "" if record["heard"] else " (unheard)"
    told = _told(record["told"])
    said = _said(record["reply"])
    events = " ".join(f"[{event['what']} {event['lease']}]" for event in record["events"])
    return f"{record['mono']:6} L{record['life']}{late}{heard} {record['script']} {told} -> {said} {events}".rstrip()


def _told(told: Json) -> str:
    if "rows" in told:
        rows = " ".join(f"{row['id']}{_value(json.loads(row['shares']))}{'!' * row['insist']}" for row in told["rows"])
        devices = " ".join(f"{name}:{_device(entry)}" for name, entry in told["devices"].items())
        return f"{told['node']} seen {_value(told['seen_epoch'])} {devices} rows: {rows or 'none'}"
    return " ".join(
        f"{name}={_value(value)}" for name, value in told.items() if name not in ("owner", "holder", "node")
    )


def _device(entry: Json) -> str:
    taken = "".join(f" -{entry[name] // _MIB} {name}" for name in ("foreign", "residual") if entry[name])
    return f"{entry['total'] // _MIB}{taken}"


def _said(reply: Json) -> str:
    words = [reply["status"]]
    if "lease" in reply:
        words.append(_view(reply["lease"]))
    words += [f"<{view['id']} {_view(view)}>" for view in reply.get("leases") or reply.get("renewed") or ()]
    shown = ("state", "ids", "freed", "unknown", "stale", "shortage", "node", "faults")
    words += [f"{name}={_value(reply[name])}" for name in shown if reply.get(name)]
    if "devices" in reply:
        words.append(" ".join(f"{name}:{use['free'] // _MIB} free" for name, use in reply["devices"].items()))
    return " ".join(words)


def _view(view: Json) -> str:
    return " ".join(
        f"{name}={_value(value)}" for name, value in sorted(view.items()) if name not in _DULL and name != "id"
    )


def _value(value: Any) -> str:
    if isinstance(value, str) and value[:1] in ("{", "["):
        return _value(json.loads(value))
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        if value >= _LARGE:
            return f"..{value % 10_000_000}"
        return f"{value // _MIB}M" if value >= _MIB else str(value)
    if isinstance(value, Mapping):
        return "{" + " ".join(f"{name}:{_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + " ".join(_value(inner) for inner in value) + "]"
    return str(value)
