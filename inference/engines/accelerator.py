"""Which accelerator an engine is built for on this machine: detected, or as asked.

An accelerator is chosen when both its hardware and its compiler are here, in the order Metal, CUDA, HIP, Vulkan; else
the processor alone. Hardware without its compiler gives a hint instead: what to install for a faster engine.
Called by `model-boss engines install` and `doctor`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from inference.engines import errors


class Accelerator(StrEnum):
    """What computes, apart from the processor."""

    CPU = "cpu"
    """Nothing else."""
    CUDA = "cuda"
    """NVIDIA; needs nvcc (the CUDA toolkit)."""
    HIP = "hip"
    """AMD; needs hipcc (ROCm)."""
    VULKAN = "vulkan"
    """Any GPU with a Vulkan driver; needs glslc and the Vulkan headers."""
    METAL = "metal"
    """Apple silicon; needs nothing but the compiler."""


@dataclass(frozen=True, slots=True)
class Tools:
    """How the machine is looked at; tests bring a pretended one."""

    system: str
    """`platform.system()`."""
    which: Callable[[str], str | None]
    """Path of a program."""
    ask: Callable[[list[str]], str]
    """Output of a program, empty when it fails."""
    root: Path
    """Where /dev, /usr and /opt are."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An accelerator and what follows from it."""

    accelerator: Accelerator
    why: str
    """What was found."""
    flags: tuple[str, ...] = ()
    """Arguments for cmake."""
    environment: Mapping[str, str] | None = None
    """Further variables cmake needs."""
    hint: str | None = None
    """What to install for a faster engine; None when nothing is missing."""


def this_machine() -> Tools:
    """Look at the real machine, with the usual toolkit directories searched after PATH."""
    places = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", "/opt/rocm/bin", "/usr/lib/wsl/lib"]
    path = os.pathsep.join(places)
    return Tools(platform.system(), lambda name: shutil.which(name, path=path), _ask, Path("/"))


def detect(tools: Tools) -> Choice:
    """Choose the best accelerator that has hardware and compiler here."""
    if tools.system == "Darwin":
        return choose(Accelerator.METAL, tools, "macOS")
    hints: list[str] = []
    for accelerator, hardware in (
        (Accelerator.CUDA, _nvidia(tools)),
        (Accelerator.HIP, _amd(tools)),
        (Accelerator.VULKAN, _render_node(tools)),
    ):
        if hardware is None:
            continue
        missing = _missing(accelerator, tools)
        if missing is None:
            return replace(choose(accelerator, tools, hardware), hint=next(iter(hints), None))
        hints.append(f"{hardware}, but {missing}")
    # A render node alone is no GPU worth naming: servers have one for their management console.
    hint = next((text for text in hints if "render node" not in text), None)
    return Choice(Accelerator.CPU, "no accelerator with its compiler found", _flags(Accelerator.CPU, tools), hint=hint)


def choose(accelerator: Accelerator, tools: Tools, why: str = "asked for") -> Choice:
    """Return what building for `accelerator` takes. Raises AcceleratorMissing when its compiler is not here."""
    missing = _missing(accelerator, tools)
    if missing is not None:
        raise errors.AcceleratorMissing(f"cannot build for {accelerator.upper()}: {missing}")
    return Choice(accelerator, why, _flags(accelerator, tools), _environment(accelerator, tools))


def _missing(accelerator: Accelerator, tools: Tools) -> str | None:
    match accelerator:
        case Accelerator.CPU:
            return None
        case Accelerator.METAL:
            return None if tools.system == "Darwin" else "Metal exists on macOS only"
        case Accelerator.CUDA:
            return None if tools.which("nvcc") else "nvcc is missing: install the CUDA toolkit (nvidia-cuda-toolkit)"
        case Accelerator.HIP:
            return None if tools.which("hipcc") else "hipcc is missing: install ROCm (package `rocm-hip-sdk`)"
        case Accelerator.VULKAN:
            if tools.which("glslc") is None:
                return "glslc is missing: install it (package `glslc` or the Vulkan SDK)"
            return None if _vulkan_headers(tools) else "the Vulkan headers are missing: install libvulkan-dev"
        case _:
            assert_never(accelerator)


def _flags(accelerator: Accelerator, tools: Tools) -> tuple[str, ...]:
    match accelerator:
        case Accelerator.CPU:
            return ("-DGGML_METAL=OFF",) if tools.system == "Darwin" else ()
        case Accelerator.METAL:
            return ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON")
        case Accelerator.CUDA:
            # llama.cpp takes the GPUs that are here (and overlooks CUDAARCHS); without one, cmake would give up.
            chips = os.environ.get("CUDAARCHS") or (None if _nvidia(tools) else "all-major")
            return ("-DGGML_CUDA=ON", *([f"-DCMAKE_CUDA_ARCHITECTURES={chips}"] if chips else []))
        case Accelerator.HIP:
            names = sorted(set(re.findall(r"\bgfx[0-9a-f]+\b", tools.ask(["rocminfo"]))))
            return ("-DGGML_HIP=ON", *([f"-DGPU_TARGETS={';'.join(names)}"] if names else []))
        case Accelerator.VULKAN:
            return ("-DGGML_VULKAN=ON",)
        case _:
            assert_never(accelerator)


def _environment(accelerator: Accelerator, tools: Tools) -> Mapping[str, str]:
    if accelerator is Accelerator.CUDA and "CUDACXX" not in os.environ and (nvcc := tools.which("nvcc")):
        return {"CUDACXX": nvcc}
    if accelerator is Accelerator.HIP and "HIPCXX" not in os.environ and (clang := tools.ask(["hipconfig", "-l"])):
        return {"HIPCXX": f"{clang.strip()}/clang", "HIP_PATH": tools.ask(["hipconfig", "-R"]).strip()}
    return {}


def _nvidia(tools: Tools) -> str | None:
    listed = tools.ask(["nvidia-smi", "-L"])
    names = re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", listed, re.MULTILINE)
    return f"{len(names)} NVIDIA GPU(s) ({names[0]})" if names else None


def _amd(tools: Tools) -> str | None:
    names = re.findall(r"^\s*Name:\s*(gfx[0-9a-f]+)\s*$", tools.ask(["rocminfo"]), re.MULTILINE)
    if names:
        return f"{len(names)} AMD GPU(s) ({names[0]})"
    return "an AMD GPU (/dev/kfd)" if (tools.root / "dev/kfd").exists() else None


def _render_node(tools: Tools) -> str | None:
    nodes = sorted((tools.root / "dev/dri").glob("renderD*"))
    return f"a render node ({nodes[0].name})" if nodes else None


def _vulkan_headers(tools: Tools) -> bool:
    places = [tools.root / "usr/include", tools.root / "usr/local/include"]
    if sdk := os.environ.get("VULKAN_SDK"):
        places.append(Path(sdk) / "include")
    return any((place / "vulkan" / "vulkan.h").exists() for place in places)


def _ask(command: list[str]) -> str:
    program = this_machine().which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
