"""Memory sizes and durations as people write them, to numbers and back.

Called by configuration, manifests and every command line. Stdlib only and light: the shim imports it through `errors`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BINARY = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_SIZES = {name.lower(): size for name, size in _BINARY.items()} | {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LARGEST_BYTES = 1 << 60
_LONGEST_S = 10 * 366 * 86400.0

_BYTES_HELP = 'write it like "20GiB", "512MiB", "1.5GiB", "8GB" (decimal), or a whole number of bytes'
_DURATION_HELP = 'write it like "30s", "5m", "2h", "1.5h", "250ms", or a number of seconds'


def whole_mib(size: int) -> int:
    """Bytes, rounded up to whole MiB."""
    return -(-size // MIB) * MIB


def parse_bytes(value: str | int) -> int:
    """Bytes from `"20GiB"`, `"64MiB"`, `"8GB"` (decimal) or a whole number; a fraction of a byte is cut off.

    Raises ValueError, with examples, for anything negative, not finite, without a number, or with an unknown unit.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"memory size {value!r} is not understood: {_BYTES_HELP}")
    if isinstance(value, int):
        if not 0 <= value <= _LARGEST_BYTES:
            raise ValueError(f"memory size {value} is out of range (0 to 1 EiB): {_BYTES_HELP}")
        return value
    digits, unit = _split(value)
    scale = 1 if unit == "" else _SIZES.get(unit.lower(), 0)
    whole, dot, fraction = digits.partition(".")
    understood = scale and _is_digits(whole) and (not dot or _is_digits(fraction)) and (unit or not dot)
    if not understood:
        raise ValueError(f"memory size {value!r} is not understood: {_BYTES_HELP}")
    # Whole-number arithmetic, for a float would round sizes above 8 PiB and shift a byte here and there below.
    size = int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if dot else 0)
    if size > _LARGEST_BYTES:
        raise ValueError(f"memory size {value!r} is out of range (0 to 1 EiB): {_BYTES_HELP}")
    return size


def parse_memory(value: str | int) -> int:
    """As `parse_bytes`, for device memory that is asked for: less than 1 MiB is a ValueError, a unit was left out."""
    size = parse_bytes(value)
    if 0 < size < MIB:
        digits, _ = _split(str(value))
        raise ValueError(f"memory size {value!r} is {format_bytes(size)}: did you mean {digits}GiB?")
    return size


def format_bytes(size: int) -> str:
    """The size with the largest binary unit that fits, one decimal where needed: `"1.5GiB"`, `"512MiB"`, `"-2GiB"`."""
    if size < 0:
        return "-" + format_bytes(-size)
    for unit, scale in _BINARY.items():
        if size >= scale:
            tenths = (size * 10 + scale // 2) // scale
            # Rounding up at a unit's edge must not print "1024MiB".
            if tenths >= 10240 and unit != "TiB":
                return f"1{_larger(unit)}"
            return f"{tenths // 10}{unit}" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{size}B"


def parse_duration(value: str | float) -> timedelta:
    """A duration from `"2h"`, `"30s"`, `"250ms"` or a number of seconds; ValueError with examples otherwise."""
    from datetime import timedelta  # here, for only this function needs it and the shim imports this module

    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"duration {value!r} is not understood: {_DURATION_HELP}")
    if isinstance(value, str):
        digits, unit = _split(value)
        scale = 1.0 if unit == "" else _SECONDS.get(unit.lower(), 0.0)
        whole, dot, fraction = digits.partition(".")
        if not scale or not _is_digits(whole) or (dot and not _is_digits(fraction)):
            raise ValueError(f"duration {value!r} is not understood: {_DURATION_HELP}")
        seconds = float(digits) * scale
    else:
        seconds = float(value)
    if not 0 <= seconds <= _LONGEST_S:  # also refuses nan, for which every comparison is false
        raise ValueError(f"duration {value!r} is out of range (0 to 10 years): {_DURATION_HELP}")
    return timedelta(seconds=seconds)


def _split(text: str) -> tuple[str, str]:
    """`"1.5 GiB"` -> `("1.5", "GiB")`."""
    text = text.strip()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return number.strip(), text[len(number) :]


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _larger(unit: str) -> str:
    names = list(_BINARY)
    return names[names.index(unit) - 1]
