"""What a model will take as far as its files and its name tell, where no engine's figures are to be had. Pure but for
looks at the files.

Called by `model_maker.py` for models that cannot run as they are: a download that is not whole, a format that no engine
here reads. The best evidence there is counts:

1. the headers of its safetensors files: the sum of their tensors, x 1.2 for cache, buffers and process
2. the size of its files, x 1.1 (GGUF) or x 1.3 (safetensors, and whatever else)
3. its name: `7b` are 7e9 parameters; `8x7b` are 5/6 of 56e9, for its experts share the rest; a quantisation such as
   `Q4_K_M` takes one bit more per parameter than its number says, an unnamed one 16; x 1.2 again
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuboss.units import format_bytes
from inference.safetensors_header import BadSafetensors, tensor_bytes

__all__ = ["GGUF_FACTOR", "Weight", "by_name", "weigh"]

GGUF_FACTOR = 1.1
"""Of the size of a GGUF file, for cache, buffers and process."""

_AROUND = 1.2
"""What cache, buffers and process add to the weights."""
_OTHER_FACTOR = 1.3

_SIZE = re.compile(
    r"(?<![a-z0-9.])(?:(?P<experts>\d{1,3})x)?(?P<number>\d{1,4}(?:\.\d{1,3})?)(?P<unit>[bm])(?![a-z0-9])"
)
_QUANTISATION = re.compile(r"(?<![a-z0-9])(?:i?q|tq)(?P<bits>[1-8])(?![0-9])|(?P<float>bf16|fp?16|fp?32|fp8|mxfp4)")
_FLOAT_BITS = {"bf16": 16, "f16": 16, "fp16": 16, "f32": 32, "fp32": 32, "fp8": 8, "mxfp4": 5}
_UNITS = {"b": 10**9, "m": 10**6}
_SHARED_BY_EXPERTS = 5 / 6


@dataclass(frozen=True, slots=True)
class Weight:
    """What a model will take, and how that is known."""

    bytes: int
    basis: str
    """In words with numbers."""


def weigh(files: Sequence[Path], name: str) -> Weight | None:
    """Of these files, as far as they are there, else of this name; None when nothing tells."""
    present = [path for path in files if _size_of(path)]
    if present and all(path.suffix == ".safetensors" for path in present):  # 1
        try:
            size = sum(map(tensor_bytes, present))
        except (BadSafetensors, OSError):
            pass  # not whole: its size tells something still
        else:
            return Weight(int(size * _AROUND), f"tensors of its files {format_bytes(size)} x {_AROUND}")
    if present:  # 2
        size = sum(map(_size_of, present))
        factor = GGUF_FACTOR if present[0].suffix.lower() == ".gguf" else _OTHER_FACTOR
        return Weight(int(size * factor), f"file {format_bytes(size)} x {factor}")
    return by_name(name)  # 3


def by_name(name: str) -> Weight | None:
    """What models of this name usually take; None where it tells no number of parameters."""
    name = name.lower()
    found = _SIZE.search(name)
    if found is None:
        return None
    parameters = float(found["number"]) * _UNITS[found["unit"]]
    if found["experts"]:
        parameters *= int(found["experts"]) * _SHARED_BY_EXPERTS
    quantised = _QUANTISATION.search(name)
    bits = 16
    if quantised is not None:
        bits = int(quantised["bits"]) + 1 if quantised["bits"] else _FLOAT_BITS[quantised["float"]]
    words = f"{found[0]} in its name: {parameters / 10**9:.3g}e9 parameters of {bits} bits x {_AROUND}"
    return Weight(int(parameters * bits / 8 * _AROUND), words)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
