"""What llama-server allocates for a GGUF model, as its header tells it: weights, KV cache, state, buffers. Pure.

Called by `estimate.py`; reads nothing itself. Where a figure cannot be exact it is too large rather than too small, for
a claim that is too small ends in an out-of-memory kill. `gpu_layers` says how many layers, counted from the last, an
accelerator holds; the others are host memory. Releases of llama.cpp differ in whether the output counts as a layer, so
the layer on the edge counts on both sides, and so do the tensors of no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuboss.units import MIB, format_bytes, whole_mib
from inference.gguf_header import GgufHeader
from inference.weights import GGUF_FACTOR

__all__ = ["CACHE_TYPES", "CONTEXT_STEP", "Figures", "Footprint", "Wish"]

CONTEXT_STEP = 256
"""llama.cpp rounds the context of a request up to a multiple of this."""

_BATCH = 512
_LARGEST_BATCH = 8192
_COMPUTE_EXTRA = MIB
"""Small tensors that nobody counts."""

_PROCESS_BYTES: Mapping[str, int] = {
    "cpu": 32 * MIB,
    "sim": 32 * MIB,
    "metal": 128 * MIB,
    "rocm": 512 * MIB,
    "cuda": 512 * MIB,
}
"""What an engine takes before it has any model, by kind of device; on a GPU mostly the driver's own."""
_PROCESS_DEFAULT = 64 * MIB

CACHE_TYPES: Mapping[str, float] = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes per element of a KV cache of that type."""

_WINDOW_PERIODS: Mapping[str, int] = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "llama4": 4}
"""Architectures whose files do not say it: one layer in so many sees the whole context, the others a sliding window."""
_RECURRENT_PERIODS: Mapping[str, int] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Architectures in which one layer in so many has a KV cache and the others a recurrent state."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the owner of a model asked for; None where he did not."""

    vram_bytes: int | None = None
    context: int | None = None
    parallel: int = 1
    gpu_layers: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    batch: int | None = None
    """Tokens computed at once."""
    whole_input: bool = False
    """An input is always computed at once, as embeddings need it."""
    flash_attention: bool = True


@dataclass(frozen=True, slots=True)
class Figures:
    """What a model takes with one context."""

    bytes: int
    """On the device it runs on."""
    words: str
    """How they come about."""
    certain_bytes: int
    """The part that is sure to be touched when all of the context is used: all but what the process itself takes."""
    host_bytes: int = 0
    """In host memory besides, where the device is an accelerator that does not hold all layers."""


class Footprint:
    """The figures of one model on one kind of device, as functions of its context."""

    def __init__(self, headers: tuple[GgufHeader, ...], mmproj_bytes: int, wish: Wish, kind: str | None) -> None:
        self.header = headers[0]
        self._headers = headers
        self._mmproj_bytes = mmproj_bytes
        self._wish = wish
        self._process_bytes = _PROCESS_BYTES.get(kind or "", _PROCESS_DEFAULT)
        self._layers = self.header.block_count or 0
        # Host memory holds all layers whatever `gpu_layers` says.
        on_device = self._layers if wish.gpu_layers is None or kind == "cpu" else min(wish.gpu_layers, self._layers)
        self._first_layer = self._layers - on_device
        self._is_split = wish.gpu_layers is not None and kind != "cpu" and wish.gpu_layers <= self._layers

    def at(self, context: int) -> Figures:
        """With `context` tokens for each of the parallel requests."""
        header, parallel = self.header, self._wish.parallel
        if not (self._layers and header.embedding_length and header.per_layer("attention.head_count", self._layers)):
            size = sum(part.file_bytes for part in self._headers) + self._mmproj_bytes
            return Figures(whole_mib(int(size * GGUF_FACTOR)), f"file {format_bytes(size)} x {GGUF_FACTOR}", size)
        cells = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        held = range(self._first_layer, self._layers)
        cache, state = self._cache_bytes(cells, held) * parallel, self._state_bytes() * parallel
        weights, compute = self._weight_bytes(held), self._compute_bytes(cells)
        parts = [f"weights {format_bytes(weights)}"]
        if self._first_layer:
            parts[0] += f" ({len(held)} of {self._layers} layers)"
        if self._mmproj_bytes:
            parts.append(f"projector {format_bytes(self._mmproj_bytes)}")
        parts.append(f"KV cache {format_bytes(cache)} ({context} tokens x {parallel})")
        if state:
            parts.append(f"recurrent state {format_bytes(state)}")
        parts += [f"compute {format_bytes(compute)}", f"process {format_bytes(self._process_bytes)}"]
        certain = weights + self._mmproj_bytes + cache + state + compute
        total = whole_mib(certain + self._process_bytes)
        return Figures(total, " + ".join(parts), certain, self._host_bytes(cells, compute))

    def _host_bytes(self, cells: int, compute: int) -> int:
        if not self._is_split:
            return 0
        kept = range(min(self._first_layer + 1, self._layers))
        # The state of recurrent layers is not told apart: all of it on both sides.
        cache, state = self._cache_bytes(cells, kept), self._state_bytes()
        return whole_mib(self._weight_bytes(kept) + (cache + state) * self._wish.parallel + compute)

    def _weight_bytes(self, held: range) -> int:
        """Tensors of these layers and of none; nothing where no layer is held."""
        total = sum(part.tensor_bytes for part in self._headers)
        if len(held) in (0, self._layers):
            return total if held else 0
        by_layer: dict[int, int] = {}
        for part in self._headers:
            for layer, size in part.layer_bytes.items():
                by_layer[layer] = by_layer.get(layer, 0) + size
        if not by_layer:  # a file of unknown quantisation: shared evenly
            return total * len(held) // self._layers
        return total - sum(size for layer, size in by_layer.items() if layer not in held)

    def _cache_bytes(self, cells: int, held: range) -> int:
        """KV cache of one request in these layers."""
        header, layers = self.header, self._layers
        if header.metadata.get(f"{header.architecture}.attention.causal") is False:
            return 0  # an encoder keeps nothing between tokens
        heads = header.per_layer("attention.head_count", layers) or ()
        kv_heads = header.per_layer("attention.head_count_kv", layers) or heads
        width = header.embedding_length or 0
        latent = header.number("attention.key_length_mla") is not None  # keys and values share one compressed vector
        window = self._window_cells(cells)
        total = 0.0
        for layer in held:
            head_size = width // heads[layer] if heads[layer] else 0
            key = (header.number("attention.key_length") or head_size) * CACHE_TYPES[self._wish.cache_type_k]
            value = (header.number("attention.value_length") or head_size) * CACHE_TYPES[self._wish.cache_type_v]
            if not self._is_recurrent(layer):
                total += kv_heads[layer] * (key + (0 if latent else value)) * (window[layer] if window else cells)
        return int(total)

    def _window_cells(self, cells: int) -> tuple[int, ...]:
        """Cells per layer where some layers see only a sliding window; empty when all see everything."""
        header = self.header
        window = header.number("attention.sliding_window") or (8192 if header.architecture == "llama4" else 0)
        pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
        period = pattern if isinstance(pattern, int) else _WINDOW_PERIODS.get(header.architecture, 0)
        if not window or not (isinstance(pattern, tuple) or period):
            return ()
        narrow = min(cells, -(-(window + (self._wish.batch or _BATCH)) // CONTEXT_STEP) * CONTEXT_STEP)
        flags = (
            header.per_layer("attention.sliding_window_pattern", self._layers) if isinstance(pattern, tuple) else None
        )
        if flags is None:
            flags = tuple(int(layer % period < period - 1) if period else 0 for layer in range(self._layers))
        return tuple(narrow if flag else cells for flag in flags)

    def _is_recurrent(self, layer: int) -> bool:
        period = self.header.number("full_attention_interval") or _RECURRENT_PERIODS.get(self.header.architecture, 0)
        return bool(period) and (layer + 1) % period != 0

    def _state_bytes(self) -> int:
        """Recurrent state of one request, in the layers that have one (in all, where the file does not say)."""
        header = self.header
        inner, size = header.number("ssm.inner_size") or 0, header.number("ssm.state_size") or 0
        kernel, groups = header.number("ssm.conv_kernel") or 0, header.number("ssm.group_count") or 0
        per_layer = (max(kernel - 1, 0) * (inner + 2 * groups * size) + inner * size) * 4
        kv_heads = header.per_layer("attention.head_count_kv", self._layers) or (1,) * self._layers
        recurrent = sum(self._is_recurrent(layer) or not kv_heads[layer] for layer in range(self._layers))
        return per_layer * (recurrent or self._layers)

    def _compute_bytes(self, cells: int) -> int:
        """Buffers for one batch: the widest layer, or the vocabulary where every token is scored; and the mask."""
        header = self.header
        width = max(header.embedding_length or 0, self._widest_attention())
        inner = max(header.per_layer("feed_forward_length", self._layers) or (0,))
        experts = (header.number("expert_used_count") or 0) * (header.number("expert_feed_forward_length") or 0)
        batch = self._wish.batch or (min(max(cells, _BATCH), _LARGEST_BATCH) if self._wish.whole_input else _BATCH)
        floats = max(3 * max(inner, experts) + 4 * width, header.vocabulary)
        if not self._wish.flash_attention:
            floats += cells * max(header.per_layer("attention.head_count", self._layers) or (0,))
        return batch * (4 * floats + 2 * cells) + _COMPUTE_EXTRA

    def _widest_attention(self) -> int:
        heads = max(self.header.per_layer("attention.head_count", self._layers) or (0,))
        return heads * (self.header.number("attention.key_length") or 0)
