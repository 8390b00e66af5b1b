"""Read how many bytes of tensors a safetensors file holds, without them and without trusting a word of it.

Called by `weights.py`. The header is JSON behind its length; every offset is checked against the file's size. Raises
`BadSafetensors` with numbers for whatever is not a whole, plausible file.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

__all__ = ["BadSafetensors", "tensor_bytes"]

_LONGEST_HEADER = 100 << 20
"""What the format's own library reads at most."""


class BadSafetensors(ValueError):
    """The file is not a sound safetensors file; says why."""


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors in the file. Raises `BadSafetensors`; a missing or unreadable file raises its OSError."""
    # Asked before it is opened, for opening a FIFO or a device could block or have effects.
    if not stat.S_ISREG(path.stat().st_mode):
        raise BadSafetensors("is not a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= min(size - 8, _LONGEST_HEADER):
            raise BadSafetensors(f"is not a safetensors file: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSafetensors(f"is not a safetensors file: its header of {length} bytes is no JSON") from error
    if not isinstance(header, dict):
        raise BadSafetensors("is not a safetensors file: its header is no JSON object")
    room = size - 8 - length
    return sum(_size(name, entry, room) for name, entry in header.items() if name != "__metadata__")


def _size(name: str, entry: Any, room: int) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    match offsets:
        case [int(begin), int(end)] if 0 <= begin <= end <= room:
            return end - begin
    raise BadSafetensors(
        f"is not a sound safetensors file, or is truncated: tensor {name[:64]!r} lies at {offsets!r} of {room} bytes"
    )
