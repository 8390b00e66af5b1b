"""Model Boss's own request fields: `x_...` in the JSON body, or `X-Boss-...` headers where that is easier.

    x_client_id    X-Boss-Client-Id      who asks, shown in the queue
    x_priority     X-Boss-Priority       urgent, high, normal, low, batch, or 0 to 1000; lower is more important
    x_stay_warm_s  X-Boss-Stay-Warm-S    seconds the model shall stay loaded after this request

A field in the body wins over its header. An unknown one, or a value that cannot be honoured, is refused: a caller who
asks for something and is silently not given it would never find out. Called by `request.py` and `api/passthrough.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.errors import BadRequest
from gpuboss.priority import NORMAL, parse_priority

BODY_PREFIX = "x_"
LONGEST_FIELD = 64
"""Characters of a name or value that are looked at: a body holds millions, and to search or repeat them takes time."""
HEADER_PREFIX = b"x-boss-"
LONGEST_CLIENT_ID = 128
LONGEST_STAY_WARM_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Extensions:
    """What a caller asked for beyond the engine's own API."""

    client_id: str | None = None
    """Who asks, as far as they said."""
    priority: int = NORMAL
    """0 to 1000; lower is more important."""
    stay_warm_s: float | None = None
    """Seconds the model shall stay loaded after this request; None: as the model says."""


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
    parser = _PARSERS.get(field)
    if parser is None:
        shown = shown[:LONGEST_FIELD]
        raise BadRequest(f"{shown} is not a field of Model Boss; {_hint(field[:LONGEST_FIELD])}", param=shown)
    try:
        return parser(found, value)
    except ValueError as error:
        raise BadRequest(f"{shown}: {error}", param=shown) from None


def _hint(field: str) -> str:
    near = difflib.get_close_matches(field, _PARSERS, n=1)
    if near:
        return f"did you mean {BODY_PREFIX}{near[0]}?"
    return f"there are {', '.join(BODY_PREFIX + name for name in _PARSERS)}"


def _client_id(found: Extensions, value: object) -> Extensions:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_CLIENT_ID or not value.isprintable():
        raise ValueError(f"must be 1 to {LONGEST_CLIENT_ID} printable characters")
    return replace(found, client_id=value)


def _priority(found: Extensions, value: object) -> Extensions:
    if not isinstance(value, str | int):
        raise ValueError("must be a name or a whole number")
    if isinstance(value, str) and len(value) > LONGEST_FIELD:
        raise ValueError(f"{value[:LONGEST_FIELD]!r}... is not a priority")
    return replace(found, priority=parse_priority(value))


def _stay_warm_s(found: Extensions, value: object) -> Extensions:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a number of seconds")
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{str(value)[:40]!r} is not a number of seconds") from None
    if not (math.isfinite(seconds) and 0 <= seconds <= LONGEST_STAY_WARM_S):
        raise ValueError(f"{seconds:g} seconds is out of range (0 to {LONGEST_STAY_WARM_S:.0f})")
    return replace(found, stay_warm_s=seconds)


_PARSERS: Mapping[str, Callable[[Extensions, object], Extensions]] = {
    "client_id": _client_id,
    "priority": _priority,
    "stay_warm_s": _stay_warm_s,
}
