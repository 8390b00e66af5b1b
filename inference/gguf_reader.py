"""Take values from a file whose size is known, and never more than is there.

Used by `gguf_header.py`. Every length comes from the file itself and is compared with the file's size before
anything is read.
"""

from __future__ import annotations

import os
import struct

Scalar = int | float | bool | str

_MOST_STEPS = 1 << 22
"""Strings stepped over in one file; the largest vocabularies and their merges need under a million."""
_U64 = struct.Struct("<Q")


class BadGguf(ValueError):
    """The file is not a whole, plausible GGUF file; the message completes "<file name> ..."."""


class Reader:
    """A position in a file whose size is known; nothing is taken before it is known to be there."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self.position = 0
        self._buffer = b""
        self._buffer_start = 0
        self._steps = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        start = self._at_hand(count)
        self.position += count
        return self._buffer[start : start + count]

    def unpack(self, layout: struct.Struct) -> Scalar:
        """The next value of that layout."""
        start = self._at_hand(layout.size)
        self.position += layout.size
        value: Scalar = layout.unpack_from(self._buffer, start)[0]
        return value

    def u32(self) -> int:
        """The next unsigned number of 4 bytes."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """The next unsigned number of 8 bytes."""
        return int.from_bytes(self.take(8), "little")

    def skip(self, count: int) -> None:
        """Step over `count` bytes without reading them."""
        self._refuse_beyond(self.position + count)
        self.position += count

    def skip_strings(self, count: int) -> None:
        """Step over `count` strings, each of which begins with its length."""
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise BadGguf(f"is not a sound GGUF file: it lists {count} strings in {self.size} bytes")
        unpack = _U64.unpack_from
        while count:
            self._at_hand(8)
            buffer, start, at = self._buffer, self._buffer_start, self.position - self._buffer_start
            last = len(buffer) - 8
            while count and at <= last:  # the hot loop: half a million turns for a large vocabulary
                at += 8 + unpack(buffer, at)[0]
                count -= 1
            self.position = start + at
            self._refuse_beyond(self.position)

    def _at_hand(self, count: int) -> int:
        """Index in the buffer of the next `count` bytes, which are in it afterwards."""
        start = self.position - self._buffer_start
        if start + count > len(self._buffer):
            self._refuse_beyond(self.position + count)
            self._buffer = os.pread(self._descriptor, max(count, 1 << 18), self.position)
            self._buffer_start, start = self.position, 0
            if len(self._buffer) < count:  # it shrank while being read
                raise _cut_short(self.position + len(self._buffer))
        return start

    def _refuse_beyond(self, end: int) -> None:
        if end > self.size:
            raise _cut_short(self.size)


def _cut_short(size: int) -> BadGguf:
    return BadGguf(f"is truncated: its {size:,} bytes end inside its header; download it again")
