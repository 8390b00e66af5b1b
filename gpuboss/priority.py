"""Priority classes: names for the integers by which waiters and victims are ordered.

Called by every front end that takes a priority from a person. A lower number is more important.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CLASSES: Mapping[str, int] = MappingProxyType({"urgent": 1, "high": 5, "normal": 10, "low": 20, "batch": 50})
"""The named classes, most important first."""
NORMAL = CLASSES["normal"]
LOW = CLASSES["low"]
LEAST_IMPORTANT = 1000
PINNED = 0
"""The class of a pinned model's lease: it yields to `OVER_PINNED` alone."""
OVER_PINNED = -1
"""The class of whom everything yields to, pinned models too: a person's wish, and leases that a person asks for so."""

ALLOWED = f"one of {', '.join(f'{name} ({number})' for name, number in CLASSES.items())}, or a whole number 0-1000"
"""What a person may write."""


def parse_priority(value: str | int) -> int:
    """The priority as a number: a class name, or 0 (most important) to 1000; ValueError says what is allowed."""
    if isinstance(value, bool):
        raise ValueError(f"priority {value!r} is not {ALLOWED}")
    text = str(value).strip().lower()
    if text in CLASSES:
        return CLASSES[text]
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= LEAST_IMPORTANT):
        raise ValueError(f"priority {value!r} is not {ALLOWED}; a lower number is more important")
    return int(text)


def name_of(priority: int) -> str:
    """The class's name where the number has one, else the number as text: what `parse_priority` takes back."""
    if priority == OVER_PINNED:
        return "over pinned"
    return next((name for name, number in CLASSES.items() if number == priority), str(priority))
