"""One model as its owner describes it: a YAML file in the manifests folder. Every key may be left out.

Called by `registry.py`. A manifest says only what its owner wants different; what it does not say comes from the
model's file. Where a value looks right but cannot be (a path without a file, an option the backend lacks),
`registry.py` says so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gpuboss.units import MIB
from inference.model import Category
from inference.names import check_alias, check_id, safe_id
from inference.validation import Bytes, Flag, Seconds, Whole, validate_document
from inference.yaml_files import Document, read_document

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("GPUBOSS_", "MODEL_BOSS_", "LLAMA_ARG_")


class Manifest(BaseModel):
    """What a manifest may say. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, AfterValidator(check_id)] | None = Field(
        default=None, description="The name callers use; the file's name when it is left out."
    )
    aliases: tuple[Annotated[str, AfterValidator(check_alias)], ...] = Field(
        default=(), description='Other names; globs such as "gpt-*" are allowed.'
    )
    category: Category | None = Field(
        default=None, description="What the model is for; told from its file when left out."
    )
    backend: str = Field(default="llama-server", description="The engine that runs it.")
    path: str | None = Field(
        default=None,
        description="The model's file, relative to the manifest (of a split one any part). Left out: the model of the "
        "same id that was found in models_dirs or in the Hugging Face cache.",
    )
    mmproj: str | None = Field(
        default=None, description="Its vision projector; one that lies next to the model is found by itself."
    )
    vram: Bytes | None = Field(
        default=None, gt=0, description='Device memory to claim, such as "6GiB"; estimated when left out.'
    )
    vram_mb: Whole | None = Field(default=None, gt=0, description="The same in MiB.")
    context: Whole | None = Field(
        default=None,
        ge=16,
        le=1 << 24,
        description="Tokens one request may use, prompt and answer together. Default: what the model was trained for, "
        "at most 32768, and what fits alone.",
    )
    parallel: Whole = Field(default=1, ge=1, le=256, description="Requests one engine serves at once.")
    replicas: Whole = Field(
        default=1, ge=1, le=64, description="Engines of this model that may run at once, where there is room and work."
    )
    gpu_layers: Whole | None = Field(
        default=None, ge=0, description="Layers to keep on the accelerator; all when left out."
    )
    options: dict[str, Any] = Field(default={}, description="Options of the backend, by name.")
    extra_args: tuple[str, ...] = Field(default=(), description="Further command line arguments for the engine.")
    env: dict[str, str] = Field(default={}, description="Further environment variables for the engine.")
    pin: Flag = Field(default=False, description="Load at start, or as soon as there is room, and never evict.")
    preload: Flag = Field(default=False, description="Load at start and whenever there is free room; may be evicted.")
    stay_warm_s: Seconds | None = Field(
        default=None, description='How long it stays loaded after its last request: seconds, or a text like "10m".'
    )
    min_residency_s: Seconds | None = Field(
        default=None,
        description="How long it stays loaded at least once it is, however much others want its room; as the "
        "configuration says when left out.",
    )
    chat_template: str | None = Field(
        default=None,
        description="A template in place of the file's own: a path relative to the manifest, a name, or its text.",
    )

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not a name for an environment variable")
            if name.startswith(_OURS):
                raise ValueError(f"{name} is set by Model Boss itself; for an engine's argument use extra_args")
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a NUL character")
        return env

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        if any("\0" in argument for argument in arguments):
            raise ValueError("an argument holds a NUL character")
        return arguments

    @field_validator("path", "mmproj", "chat_template", "backend")
    @classmethod
    def _check_text(cls, text: str | None) -> str | None:
        if text is not None and (not text.strip() or "\0" in text):
            raise ValueError("must not be empty")
        return text

    @field_validator("vram_mb")
    @classmethod
    def _check_vram(cls, vram_mb: int | None, info: ValidationInfo) -> int | None:
        if vram_mb is not None and info.data.get("vram") is not None:
            raise ValueError("vram and vram_mb say the same thing: keep one of them")
        return vram_mb

    @property
    def vram_bytes(self) -> int | None:
        """What `vram` or `vram_mb` ask for; None when the manifest leaves it to the estimate."""
        return self.vram_mb * MIB if self.vram_mb is not None else self.vram


def read_manifest(path: Path) -> tuple[Manifest, Document] | None:
    """The manifest in a file and the document it came from; None when the file holds nothing but comments.

    Raises `yaml_files.BadInput` with every problem of the file.
    """
    document = read_document(path)
    if not document.data:
        return None
    return validate_document(document, Manifest), document


def id_of(manifest: Manifest, document: Document) -> str:
    """The model's id: the one given, else one like the manifest's file name."""
    return manifest.id or safe_id(document.path.stem)


def id_of_broken(path: Path) -> str | None:
    """The id that a manifest with problems was meant for, if it can be told; so that the model shows up with them."""
    try:
        given = read_document(path).data.get("id")
        return check_id(given) if isinstance(given, str) else None
    except ValueError:
        return None
