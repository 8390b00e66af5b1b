"""What llama-server's last lines say about its end: read by `llama_server.py`.

The order matters: a load that runs out of memory ends with the same words as one whose file is broken, and a file that
cannot be read today (a network drive that is away) may be tomorrow.

1. an allocation failed            OUT_OF_MEMORY
2. the system could not read       CRASH
3. it shows its usage              BAD_ARGUMENTS
4. it refuses the file             BAD_MODEL
5. anything else                   CRASH
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from inference.fault import Fault
from inference.process import Exited

__all__ = ["diagnose"]

_NO_MEMORY: Final = re.compile(
    r"failed to allocate (?!.*pinned memory)"  # ggml's and llama.cpp's own words, on every kind of device
    r"|unable to allocate \S+ buffer"
    r"|failed to reserve initial output buffer"
    r"|(?:cuda|hip)Malloc(?:Managed|Async)? failed"
    r"|(?:CUDA|ROCm|MUSA) error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
    r"|OutOf(?:Device|Host)?Memory"  # Vulkan, Metal
    r"|[Ii]nsufficient [Mm]emory"  # Metal
    r"|std::bad_alloc"
    r"|Cannot allocate memory"
)
_UNREADABLE_NOW: Final = re.compile(
    r"Input/output error|Stale file handle|Remote I/O error|Transport endpoint|Connection timed out|Too many open files"
)
_USAGE: Final = re.compile(r"^error(?:: | while handling (?:argument|environment variable) )")
_USELESS_OPTION: Final = re.compile(r"requires Flash Attention|failed to apply template|failed to load lora adapter")
_REFUSED: Final = re.compile(
    r"error loading model|failed to load model|failed to load (?:multimodal|draft) model|Failed to load CLIP model"
)


def diagnose(ended: Exited, last_lines: Sequence[str]) -> Fault:
    """The fault of an engine that ended so, with these last lines."""

    def says(what: re.Pattern[str]) -> bool:
        return any(what.search(line) for line in last_lines)

    if says(_NO_MEMORY):  # 1
        return Fault.OUT_OF_MEMORY
    if ended.code in (None, 0) or says(_UNREADABLE_NOW):  # 2, and 5: the rest is said by an exit
        return Fault.CRASH
    if says(_USAGE) or says(_USELESS_OPTION):  # 3
        return Fault.BAD_ARGUMENTS
    return Fault.BAD_MODEL if says(_REFUSED) else Fault.CRASH  # 4 and 5
