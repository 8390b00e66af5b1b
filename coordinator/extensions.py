"""Model Boss's own request fields: `x_...` in the JSON body, or `X-Boss-...` headers where that is easier.

    x_client_id    X-Boss-Client-Id      who asks: shown in the queue, and known again when they come back
    x_priority     X-Boss-Priority       urgent, high, normal, low, batch, or 0 to 1000; lower is more important
    x_stay_warm_s  X-Boss-Stay-Warm-S    seconds the model shall stay loaded after this request
    x_budget_s     X-Boss-Budget-S       seconds the engine may work on it; neither waiting nor loading counts
    x_cooldown_s   X-Boss-Cooldown-S     seconds the client's next request waits after this one is done
    x_session_id   X-Boss-Session-Id     a conversation: of several engines of a model it goes to the one it had last

A field in the body wins over its header. An unknown one, or a value that cannot be honoured, is refused: a caller who
asks for something and is silently not given it would never find out. Called by `request.py` and `api/passthrough.py`;
`openapi.py` documents `FIELDS`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from coordinator.errors import BadRequest
from gpuboss.priority import ALLOWED, CLASSES, LEAST_IMPORTANT, NORMAL, parse_priority

BODY_PREFIX = "x_"
LONGEST_REST_S = 60.0
"""What a request may ask for its client: an id is only said, so it may be somebody else's."""
LONGEST_FIELD = 64
"""Characters of a name or value that are looked at: a body holds millions, and to search or repeat them takes time."""
HEADER_PREFIX = b"x-boss-"
LONGEST_ID = 128
LONGEST_STAY_WARM_S = 7 * 86400.0
LONGEST_BUDGET_S = 86400.0


@dataclass(frozen=True, slots=True)
class Extensions:
    """What a caller asked for beyond the engine's own API."""

    client_id: str | None = None
    """Who asks, as far as they said."""
    priority: int = NORMAL
    """0 to 1000; lower is more important."""
    stay_warm_s: float | None = None
    """Seconds the model shall stay loaded after this request; None: as the model says."""
    budget_s: float | None = None
    """Seconds its engine may work on it, from the grant to the end of the answer; None: as long as it takes."""
    cooldown_s: float | None = None
    """Seconds the client's next request waits after this one is done; None: as configured."""
    session_id: str | None = None
    """The conversation it belongs to, as far as they said."""


NONE = Extensions()


def parse(body: Mapping[str, object], headers: Iterable[tuple[bytes, bytes]]) -> Extensions:
    """The extensions of a request.

    Raises:
        BadRequest: an unknown field, or a value that cannot be honoured; it names the field.
    """
    found = NONE
    for header, text in headers:
        if header.startswith(HEADER_PREFIX):
            shown = header.decode("latin-1")
            field = shown[len(HEADER_PREFIX) :].replace("-", "_")
            found = _with(found, field, text.decode("latin-1"), shown=shown)
    for key, value in body.items():
        if key.startswith(BODY_PREFIX):
            found = _with(found, key[len(BODY_PREFIX) :], value, shown=key)
    return found


def without(body: Mapping[str, object]) -> dict[str, object]:
    """The body as the engine may see it."""
    return {key: value for key, value in body.items() if not key.startswith(BODY_PREFIX)}


def _with(found: Extensions, field: str, value: object, *, shown: str) -> Extensions:
    known = FIELDS.get(field)
    if known is None:
        shown = shown[:LONGEST_FIELD]
        raise BadRequest(f"{shown} is not a field of Model Boss; {_hint(field[:LONGEST_FIELD])}", param=shown)
    try:
        return known.parse(found, value)
    except ValueError as error:
        raise BadRequest(f"{shown}: {error}", param=shown) from None


def _hint(field: str) -> str:
    near = difflib.get_close_matches(field, FIELDS, n=1)
    if near:
        return f"did you mean {BODY_PREFIX}{near[0]}?"
    return f"there are {', '.join(BODY_PREFIX + name for name in FIELDS)}"


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID or not value.isprintable():
        raise ValueError(f"must be 1 to {LONGEST_ID} printable characters")
    return value


def _seconds(value: object, longest_s: float) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a number of seconds")
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{str(value)[:40]!r} is not a number of seconds") from None
    if not (math.isfinite(seconds) and 0 <= seconds <= longest_s):
        raise ValueError(f"{seconds:g} seconds is out of range (0 to {longest_s:.0f})")
    return seconds


def _client_id(found: Extensions, value: object) -> Extensions:
    return replace(found, client_id=_text(value))


def _session_id(found: Extensions, value: object) -> Extensions:
    return replace(found, session_id=_text(value))


def _priority(found: Extensions, value: object) -> Extensions:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"must be {ALLOWED}")
    if isinstance(value, str) and len(value) > LONGEST_FIELD:
        raise ValueError(f"{value[:LONGEST_FIELD]!r}... is not {ALLOWED}")
    return replace(found, priority=parse_priority(value))


def _stay_warm_s(found: Extensions, value: object) -> Extensions:
    return replace(found, stay_warm_s=_seconds(value, LONGEST_STAY_WARM_S))


def _cooldown_s(found: Extensions, value: object) -> Extensions:
    return replace(found, cooldown_s=_seconds(value, LONGEST_REST_S))


def _budget_s(found: Extensions, value: object) -> Extensions:
    budget_s = _seconds(value, LONGEST_BUDGET_S)
    if budget_s == 0:
        raise ValueError("0 seconds is no time to answer in; leave it out for as long as it takes")
    return replace(found, budget_s=budget_s)


@dataclass(frozen=True, slots=True)
class Field:
    """One of Model Boss's own fields."""

    parse: Callable[[Extensions, object], Extensions]
    """Adds the value to what was found; ValueError for one that cannot be honoured."""
    words: str
    """What it means, for `/docs`."""
    schema: Mapping[str, Any]
    """Its JSON schema."""


def _seconds_schema(longest_s: float, least: str = "minimum") -> Mapping[str, Any]:
    return {"type": "number", least: 0, "maximum": longest_s}


_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": LONGEST_ID}
_PRIORITY_SCHEMA = {
    "oneOf": [
        {"type": "string", "enum": list(CLASSES)},
        {"type": "integer", "minimum": 0, "maximum": LEAST_IMPORTANT},
    ],
    "default": "normal",
}

FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "client_id": Field(_client_id, "Who asks: shown in the queue, and known again when they return.", _TEXT_SCHEMA),
        "priority": Field(_priority, "A class, or a number of which lower is more important.", _PRIORITY_SCHEMA),
        "stay_warm_s": Field(
            _stay_warm_s,
            "Seconds the model shall stay loaded after this request.",
            _seconds_schema(LONGEST_STAY_WARM_S),
        ),
        "budget_s": Field(
            _budget_s,
            "Seconds its engine may work on it; neither waiting nor loading counts. Over it: 504 `budget_exceeded`.",
            _seconds_schema(LONGEST_BUDGET_S, "exclusiveMinimum"),
        ),
        "cooldown_s": Field(
            _cooldown_s,
            "Seconds the next request of the same client waits after this one is done.",
            _seconds_schema(LONGEST_REST_S),
        ),
        "session_id": Field(
            _session_id,
            "A conversation: of several engines of a model it goes to the one it had last, while that has a place.",
            _TEXT_SCHEMA,
        ),
    }
)
"""By name, without prefix."""
