"""A model as the rest of the program sees it: one frozen value, resolved from manifest, file header and defaults.

Made by `registry.py`; read by the scheduler (what it needs), the backends (how to start it) and the API (what to show).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path


class Category(StrEnum):
    """What a model is for; decides its endpoints and how long it stays warm."""

    LLM = "llm"
    """Chat and completions."""
    EMBEDDING = "embedding"
    """Vectors for texts."""
    RERANK = "rerank"
    """Scores for pairs of texts."""
    VISION = "vision"
    """Chat with images (a GGUF with its mmproj)."""


STAY_WARM_S: Mapping[Category, float] = {
    Category.LLM: 300.0,
    Category.EMBEDDING: 300.0,
    Category.RERANK: 300.0,
    Category.VISION: 60.0,
}
"""Seconds a model stays loaded after its last request, where neither request nor manifest says otherwise."""


@dataclass(frozen=True, slots=True)
class Model:
    """One servable (or broken, see `problem`) model."""

    id: str
    """The name callers use; also what responses carry as `model`."""
    category: Category
    backend: str
    """A key of `backends.REGISTRY`."""
    path: Path
    """The model file (of a split GGUF: its first part)."""
    claim_bytes: int
    """Device memory its lease claims."""
    claim_basis: str
    """Where `claim_bytes` comes from, in words with numbers."""
    file_bytes: int
    """Size of the file, all parts of a split one together."""
    context: int
    """Tokens one request may use, prompt and answer together."""
    host_bytes: int = 0
    """Host memory it needs besides where it runs on an accelerator: the layers that `gpu_layers` keeps on the CPU."""
    parallel: int = 1
    """Requests one engine of it serves at once."""
    replicas: int = 1
    """Slots it may have at once, each with an engine of its own."""
    stay_warm_s: float = STAY_WARM_S[Category.LLM]
    """Seconds it stays loaded after its last request."""
    min_residency_s: float | None = None
    """Seconds it stays loaded at least; None: what the configuration says."""
    pin: bool = False
    """Never evicted, and loaded at start."""
    preload: bool = False
    """Loaded at start and whenever there is free room; may be evicted."""
    aliases: tuple[str, ...] = ()
    """Other names; may be globs such as `gpt-*`."""
    mmproj: Path | None = None
    """Vision projector that belongs to the model."""
    gpu_layers: int | None = None
    """Layers to keep on the accelerator; None means all."""
    chat_template: str | None = None
    """A template that replaces the file's own: text, or a path."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The backend's own typed options."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for the engine, from the manifest alone."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment for the engine, from the manifest alone."""
    source: str = ""
    """Where the model was found: a manifest's path, or the folder that was scanned."""
    problem: str | None = None
    """Why the model cannot be served, in words for its owner; None when it can."""
    vram_bytes: int | None = None
    """What its manifest says that it takes; None where it does not."""

    def is_other_than(self, before: Model) -> bool:
        """Has its owner changed it? What was learned about its memory meanwhile does not count."""
        learned = replace(
            before, claim_bytes=self.claim_bytes, claim_basis=self.claim_basis, host_bytes=self.host_bytes
        )
        return self != learned

    def ruled_by(self, other: Model) -> Model:
        """The same engine under the other's rules: what the scheduler alone reads, so that it needs no load."""
        return replace(
            self,
            pin=other.pin,
            preload=other.preload,
            replicas=other.replicas,
            stay_warm_s=other.stay_warm_s,
            min_residency_s=other.min_residency_s,
        )
