"""What makes a binary built here unfit elsewhere: system, C library and the processor's instruction sets.

A home directory may be shared by several machines, and engines are compiled for the processor they are built on, so
this text is part of a cache entry's name. It leaves out what changes with a kernel or microcode update, or every such
update would throw the engine away. Called by `recipe.py` and `cache.py`.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import subprocess
from pathlib import Path

_VECTOR = re.compile(
    r"sse|avx|amx|fma|f16c|bmi|abm|movbe|gfni|vaes|vpclmul|sha_ni|adx|"  # x86
    r"asimd|sve|sme|i8mm|bf16|fphp|crc32|atomics"  # arm
)
"""Instruction sets a compiler may use in the engine's code."""


@functools.cache
def machine_tag() -> str:
    """Name this kind of machine, such as `linux-x86_64-glibc2.36-3f9a01c2`."""
    library, version = platform.libc_ver()
    system = f"{platform.system()}-{platform.machine()}".lower()
    return (
        f"{system}-{library}{version}-{processor_tag(_processor())}"
        if library
        else f"{system}-{processor_tag(_processor())}"
    )


def processor_tag(description: str) -> str:
    """Eight hex digits that differ when code built for one processor may not run on the other."""
    return hashlib.sha256(description.encode()).hexdigest()[:8]


def describe_cpuinfo(text: str) -> str:
    """Pick model and instruction sets out of the first block of /proc/cpuinfo."""
    block = text.split("\n\n", 1)[0]
    fields = dict(re.findall(r"^([^:\t]+?)\s*:\s*(.*)$", block, re.MULTILINE))
    model = [fields.get(key, "") for key in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return " ".join([*model, *sorted(flag for flag in flags if _VECTOR.search(flag))])


def _processor() -> str:
    try:
        return describe_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        pass  # not Linux
    try:
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=5)  # noqa: S607 - the system's own
    except (OSError, subprocess.TimeoutExpired):
        return platform.processor()
    return asked.stdout.strip()
