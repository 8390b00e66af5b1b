"""How much memory a model's lease shall claim, why, and the context that fits. Pure.

Called by `model_maker.py` for every model; calls `footprint.py`. The best evidence there is counts:

1. learned    what this model, with these options, was seen to take when it ran before (`learned.py`), and a margin
2. manifest   the `vram` its owner gave; of the two the larger, with a warning where the owner's is too small
3. estimate   what its file's header says (`footprint.py`), or the file's size and a factor where it says too little

What is no whole GGUF file cannot run yet; `weights.py` says what it would take.

A learned figure raises a claim at once. It lowers one from the third load on, when it has been seen at work and not
only at its start. On `cpu` it never lowers it below weights, cache and buffers: what of them nobody has touched yet is
not resident, and will be. On an accelerator all of it is allocated before the engine is ready: there the figure stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuboss.units import MIB, format_bytes, whole_mib
from inference.footprint import CONTEXT_STEP, Figures, Footprint, Wish
from inference.gguf_header import GgufHeader

__all__ = ["Claim", "Peak", "Room", "Wish", "claim", "default_context"]

MOST_DEFAULT_CONTEXT = 32768
"""Tokens a model gets without being asked for more, even when it was trained for more."""
LEAST_DEFAULT_CONTEXT = 2048
"""Tokens a model gets even when they do not fit: it is then refused with numbers instead of being useless."""
LOADS_TO_LOWER = 3
"""So many loads must have been seen before what they took lowers a claim."""
_MARGIN_PERCENT = 5
_LEAST_MARGIN = 8 * MIB
"""On top of what was seen: drivers and allocators do not take the same to the byte each time."""


@dataclass(frozen=True, slots=True)
class Room:
    """The device with the most memory for one model, as far as it is known."""

    bytes: int
    """What a model could have there if nothing else ran."""
    kind: str
    """`cuda`, `rocm`, `metal`, `cpu` or `sim`."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What loads of a model were seen to take at most, with the same options on the same kind of device."""

    bytes: int
    """On the devices it ran on, all together."""
    loads: int
    """How many of the latest loads that is of."""
    host_bytes: int = 0
    """In host memory besides, where its lease had a share of that."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a model's lease shall ask for, and why."""

    bytes: int
    basis: str
    """Where that comes from, in words with numbers."""
    context: int
    """Tokens per request that this includes."""
    warnings: tuple[str, ...] = ()
    """What its owner should know, e.g. that the `vram` he gave looks too small."""
    host_bytes: int = 0
    """Of host memory, where it runs on an accelerator that does not hold all of its layers."""


Seen = Callable[[int], Peak | None]
"""What loads with a context were seen to take; None where there were none."""


def claim(
    headers: tuple[GgufHeader, ...],
    mmproj_bytes: int,
    wish: Wish,
    room: Room | None,
    seen: Seen = lambda _: None,
) -> Claim:
    """The claim of a model whose file parts have these headers (the first part describes it)."""
    kind = room.kind if room else None
    model = Footprint(headers, mmproj_bytes, wish, kind)
    limits = [size for size in (wish.vram_bytes, room.bytes if room else None) if size is not None]
    context = wish.context or default_context(model, min(limits, default=None))
    made = _known(model.at(context), seen(context), kind)
    if room is not None and wish.context is None and made.bytes > room.bytes:
        context, made = _smaller(model, seen, room, context, made)
    warnings = []
    trained = headers[0].context_length
    if trained and context > trained:
        warnings.append(f"context {context} is more than the {trained} tokens the model was trained for")
    if wish.vram_bytes is None:  # 1, 3
        return Claim(made.bytes, made.words, context, tuple(warnings), made.host_bytes)
    return _with_owner(wish.vram_bytes, made, seen(context), Claim(0, "", context, tuple(warnings), made.host_bytes))


def default_context(model: Footprint, limit_bytes: int | None) -> int:
    """Tokens per request when nobody asked: what it was trained for, at most 32k, and what fits into the limit."""
    wanted = min(model.header.context_length or 4096, MOST_DEFAULT_CONTEXT)
    if limit_bytes is None or model.at(wanted).bytes <= limit_bytes:
        return wanted
    least = min(wanted, LEAST_DEFAULT_CONTEXT)
    low, high = least // CONTEXT_STEP, wanted // CONTEXT_STEP
    while low < high:  # the largest multiple of the step that fits; the estimate never falls as the context grows
        middle = (low + high + 1) // 2
        low, high = (middle, high) if model.at(middle * CONTEXT_STEP).bytes <= limit_bytes else (low, middle - 1)
    return max(low * CONTEXT_STEP, least)


def _known(estimate: Figures, peak: Peak | None, kind: str | None) -> Figures:
    """1 before 3: the estimate, corrected by what was seen."""
    if peak is None:
        return estimate
    most = _with_margin(peak.bytes)
    host = _with_margin(peak.host_bytes) if peak.host_bytes and estimate.host_bytes else 0
    told = _told(peak)
    if peak.loads < LOADS_TO_LOWER:
        host = max(host, estimate.host_bytes)
        if most <= estimate.bytes:
            return replace(estimate, words=f"{estimate.words}; {told}, which is less", host_bytes=host)
    elif kind == "cpu" and most < estimate.certain_bytes:
        most = whole_mib(estimate.certain_bytes)
        told += f", and not less than the {format_bytes(estimate.certain_bytes)} of weights, cache and buffers"
    words = f"{told} (estimate: {format_bytes(estimate.bytes)} = {estimate.words})"
    return replace(estimate, bytes=most, words=words, host_bytes=host or estimate.host_bytes)


def _smaller(model: Footprint, seen: Seen, room: Room, context: int, made: Figures) -> tuple[int, Figures]:
    """A shorter context for a model that took more than was estimated, and would never fit again as it is."""
    excess = made.bytes - model.at(context).bytes
    shorter = default_context(model, room.bytes - excess)
    if shorter >= context:
        return context, made
    estimate = model.at(shorter)
    if (peak := seen(shorter)) is not None:
        return shorter, _known(estimate, peak, room.kind)
    words = f"{estimate.words} + {format_bytes(excess)} that it took beyond its estimate with {context} tokens"
    return shorter, replace(estimate, bytes=estimate.bytes + excess, words=words)


def _with_owner(vram_bytes: int, made: Figures, peak: Peak | None, claimed: Claim) -> Claim:
    """2: the owner's figure, but no less than what was seen."""
    seen_bytes = 0 if peak is None else _with_margin(peak.bytes)
    remedy = "raise vram, or lower context or parallel"
    warning = ""
    if peak is not None and seen_bytes > vram_bytes:
        warning = (
            f"vram {format_bytes(vram_bytes)} is less than the {format_bytes(peak.bytes)} it was seen to take at most "
            f"in {_times(peak.loads)}, so {format_bytes(seen_bytes)} are claimed; {remedy}"
        )
        basis = f"{_told(peak)}; vram in the manifest is {format_bytes(vram_bytes)}"
    else:
        if vram_bytes < made.bytes:
            warning = (
                f"vram {format_bytes(vram_bytes)} is less than the estimate of {format_bytes(made.bytes)} "
                f"({made.words}); {remedy}"
            )
        basis = f"vram in the manifest ({_named(made)})"
    warnings = (*claimed.warnings, warning) if warning else claimed.warnings
    return replace(claimed, bytes=max(vram_bytes, seen_bytes), basis=basis, warnings=warnings)


def _named(made: Figures) -> str:
    return made.words if made.words.startswith("learned") else f"estimate: {format_bytes(made.bytes)} = {made.words}"


def _with_margin(size: int) -> int:
    return whole_mib(size + max(size * _MARGIN_PERCENT // 100, _LEAST_MARGIN))


def _told(peak: Peak) -> str:
    return f"learned: {format_bytes(peak.bytes)} at most in {_times(peak.loads)} + {_MARGIN_PERCENT} %"


def _times(loads: int) -> str:
    return f"the last {loads} loads" if loads > 1 else "its last load"
