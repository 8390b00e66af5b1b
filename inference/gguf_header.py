"""Read what a GGUF file says about itself, without its weights and without trusting a word of it.

Called by `registry.py` for every model file, before any engine sees it. Every count, length and offset is checked
against the file's size before it is used; vocabularies are stepped over, not kept. A file of 150,000 tokens takes
some tens of milliseconds. Raises `BadGguf` with numbers for whatever is not a whole, plausible GGUF file.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inference.gguf_reader import BadGguf, Reader, Scalar

__all__ = ["BadGguf", "GgufHeader", "HeaderCache", "read_header"]

Metadata = Mapping[str, Scalar | tuple[Scalar, ...]]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one GGUF file (one part, if it is split) says about itself."""

    version: int
    metadata: Metadata
    """Short values only: numbers, text up to 256 bytes, and the arrays that hold one number per layer."""
    has_chat_template: bool
    vocabulary: int
    """Number of tokens in its tokenizer; 0 when it has none."""
    tensor_count: int
    tensor_bytes: int
    """Bytes of all tensors in this file."""
    layer_bytes: Mapping[int, int]
    """Bytes of the tensors of each block, by block number; what is in no block is not in here."""
    file_bytes: int

    @property
    def architecture(self) -> str:
        """`general.architecture`; empty when the file names none."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """A whole number under `<architecture>.<key>`; None when it is missing, negative or something else."""
        return _whole(self.metadata.get(f"{self.architecture}.{key}"))

    def per_layer(self, key: str, layers: int) -> tuple[int, ...] | None:
        """`<architecture>.<key>` for each layer, whether the file has one number for all or an array."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            numbers = [int(item) if isinstance(item, bool) else _whole(item) for item in value]
            return tuple(item or 0 for item in numbers[:layers]) if len(numbers) >= layers else None
        single = _whole(value)
        return None if single is None else (single,) * layers

    @property
    def context_length(self) -> int | None:
        """Tokens it was trained for."""
        return self.number("context_length")

    @property
    def block_count(self) -> int | None:
        """Its layers."""
        return self.number("block_count")

    @property
    def embedding_length(self) -> int | None:
        """Width of its hidden state."""
        return self.number("embedding_length")

    @property
    def split(self) -> tuple[int, int]:
        """(number of this part from 0, number of parts); (0, 1) for a whole file."""
        count = _whole(self.metadata.get("split.count")) or 1
        return _whole(self.metadata.get("split.no")) or 0, count


class HeaderCache:
    """Remembers what was read of files that have not changed since, whether it was good or not."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], GgufHeader | BadGguf]] = {}

    def read(self, path: Path) -> GgufHeader:
        """Like `read_header`."""
        status = path.stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.get(path)
        if known is None or known[0] != version:
            try:
                known = (version, read_header(path))
            except BadGguf as error:
                known = (version, error)
            self._known[path] = known
        if isinstance(known[1], BadGguf):
            raise BadGguf(str(known[1]))
        return known[1]


def read_header(path: Path) -> GgufHeader:
    """The header of the file at `path`. Raises `BadGguf`; a missing or unreadable file raises its OSError."""
    # Asked before it is opened, for opening a FIFO or a device could block or have effects.
    _refuse_irregular(path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _refuse_irregular(status.st_mode)
        return _read(Reader(descriptor, status.st_size))
    finally:
        os.close(descriptor)


# -- one file ------------------------------------------------------------------------------------------------------

_MOST_KEYS = 1 << 14
_MOST_TENSORS = 1 << 17
_MOST_BLOCKS = 1 << 12
_LONGEST_NAME = 1 << 10
_LONGEST_KEPT_TEXT = 256
_PER_LAYER = (".head_count", ".head_count_kv", ".sliding_window_pattern", ".recurrent_layers", ".feed_forward_length")

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRUCTS = {number: struct.Struct(code) for number, code in _SCALARS.items()}

TYPE_SIZES: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip
"""ggml type number -> (elements per block, bytes per block)."""


def _read(reader: Reader) -> GgufHeader:
    version = _read_preamble(reader)
    tensor_count, key_count = reader.u64(), reader.u64()
    if key_count > _MOST_KEYS or tensor_count > _MOST_TENSORS:
        raise BadGguf(
            f"is not a sound GGUF file: it claims {key_count} keys and {tensor_count} tensors in {reader.size} bytes"
        )
    metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
    lengths: dict[str, int] = {}
    for _ in range(key_count):
        key = _read_name(reader)
        value, length = _read_value(reader, per_layer=key.endswith(_PER_LAYER))
        lengths[key] = length
        if value is not None:
            metadata[key] = value
    tensor_bytes, layer_bytes = _read_tensors(reader, tensor_count, metadata.get("general.alignment", 32))
    header = GgufHeader(
        version=version,
        metadata=metadata,
        has_chat_template=lengths.get("tokenizer.chat_template", 0) > 0,
        vocabulary=lengths.get("tokenizer.ggml.tokens", 0),
        tensor_count=tensor_count,
        tensor_bytes=tensor_bytes,
        layer_bytes=layer_bytes,
        file_bytes=reader.size,
    )
    if (header.block_count or 0) > _MOST_BLOCKS:
        raise BadGguf(f"is not a sound GGUF file: it claims {header.block_count} blocks")
    return header


def _read_preamble(reader: Reader) -> int:
    if reader.size == 0:
        raise BadGguf("is empty (0 bytes)")
    start = reader.take(min(4, reader.size))
    if start != b"GGUF":
        shown = repr(start).removeprefix("b")
        raise BadGguf(f"is not a GGUF file: it begins with {shown}, not with 'GGUF'")
    version = reader.u32()
    if version & 0xFFFF == 0 and version:
        raise BadGguf("is a GGUF file for big-endian machines; convert it, or fetch the usual one")
    if version not in (2, 3):
        raise BadGguf(f"is a GGUF file of version {version}; versions 2 and 3 are understood")
    return version


def _read_name(reader: Reader) -> str:
    length = reader.u64()
    if length > _LONGEST_NAME:
        raise BadGguf(f"is not a sound GGUF file: a name of {length} bytes at byte {reader.position - 8}")
    return reader.take(length).decode("utf-8", "replace")


def _read_value(reader: Reader, *, per_layer: bool) -> tuple[Scalar | tuple[Scalar, ...] | None, int]:
    """The value, or None when it is not worth keeping, and its length (of text in bytes, of an array in items)."""
    kind = reader.u32()
    if kind == _STRING:
        length = reader.u64()
        if length > _LONGEST_KEPT_TEXT:
            reader.skip(length)
            return None, length
        return reader.take(length).decode("utf-8", "replace"), length
    if kind != _ARRAY:
        return reader.unpack(_layout_of(kind, reader)), 1
    kind, count = reader.u32(), reader.u64()
    if kind == _STRING:
        reader.skip_strings(count)
        return None, count
    layout = _layout_of(kind, reader)
    if not per_layer or count > _MOST_BLOCKS:
        reader.skip(count * layout.size)
        return None, count
    return tuple(reader.unpack(layout) for _ in range(count)), count


def _layout_of(kind: int, reader: Reader) -> struct.Struct:
    layout = _STRUCTS.get(kind)
    if layout is None:
        raise BadGguf(f"is not a sound GGUF file: value type {kind} at byte {reader.position} does not exist")
    return layout


def _read_tensors(reader: Reader, count: int, alignment: object) -> tuple[int, dict[int, int]]:
    """(bytes of all tensors, bytes by block); every tensor is known to lie inside the file afterwards."""
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise BadGguf(f"is not a sound GGUF file: alignment {alignment!r} is not a power of two")
    total, by_block, end, unsized = 0, dict[int, int](), 0, 0
    for _ in range(count):
        name, size, offset = _read_tensor(reader)
        # Tensors follow one another without gaps; the engine insists on it too.
        expected = -(-end // alignment) * alignment
        if offset % alignment or (offset != expected and not unsized):
            raise BadGguf(f"is not a sound GGUF file: tensor {name[:64]!r} starts at {offset}, expected at {expected}")
        unsized += size is None
        total += size or 0
        end = max(end, offset + (size or 0))
        block = name.split(".", 2)[1] if name.startswith("blk.") else ""
        if block.isdecimal() and len(block) <= 4:
            by_block[int(block)] = by_block.get(int(block), 0) + (size or 0)
    data_start = -(-reader.position // alignment) * alignment
    if count and data_start + end > reader.size:
        needed = data_start + end
        raise BadGguf(
            f"is truncated: its tensors need {needed:,} bytes, the file has {reader.size:,} "
            f"({reader.size * 100 // needed} %); download it again"
        )
    if unsized:  # a quantisation newer than the table above: the file's size is then the best figure
        return max(total, reader.size - data_start), {}
    return total, by_block


def _read_tensor(reader: Reader) -> tuple[str, int | None, int]:
    """(name, bytes or None for an unknown type, offset in the data)."""
    name = _read_name(reader)
    dimensions = reader.u32()
    if dimensions > 4:
        raise BadGguf(f"is not a sound GGUF file: tensor {name[:64]!r} has {dimensions} dimensions, at most 4 exist")
    shape = [reader.u64() for _ in range(dimensions)]
    kind, offset = reader.u32(), reader.u64()
    elements = 1
    for length in shape:
        elements *= length
    if max(elements, offset) >= 1 << 63:
        raise BadGguf(f"is not a sound GGUF file: tensor {name[:64]!r} of shape {shape} at {offset} is not possible")
    if kind not in TYPE_SIZES:
        return name, None, offset
    per_block, block_bytes = TYPE_SIZES[kind]
    if shape and shape[0] % per_block:
        raise BadGguf(f"is not a sound GGUF file: tensor {name[:64]!r} has rows of {shape[0]}, not of n x {per_block}")
    return name, -(-elements // per_block) * block_bytes, offset


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _refuse_irregular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise BadGguf("is a directory; name the .gguf file in it")
    if not stat.S_ISREG(mode):
        raise BadGguf("is not a regular file")
