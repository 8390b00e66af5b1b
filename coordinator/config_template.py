"""The files that `model-boss init` writes: every key with what it means, commented out, at its default.

Called by `cli/config.py`. Made from the models that check these files, so that neither can drift from the other. A
comment is `# text`; a setting that only needs its mark removed is `#key: value`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordinator.settings import Settings
from gpuboss.units import format_bytes
from inference.manifest import Manifest

_HEAD = """\
# Model Boss configuration. Everything here is optional: what is commented out is at its default (or an example, where
# the default is nothing). Paths start at this file. `model-boss config check` finds mistakes, `model-boss config show`
# prints what is in force and where it comes from.
"""
_MANIFEST_HEAD = """\
# A manifest: how one model shall be run. Models need none; write one to give a model a shorter name, more context, a
# claim of memory that you know better, or to pin it. One file per model, named as you like. Copy this one, remove the #
# from the lines you need, and see `model-boss config check`.
"""
_EXAMPLES: Mapping[str, object] = {
    "default_model": "my-model",
    "models_dirs": ["~/models"],
    "state_dir": "~/.local/state/gpuboss",
    "store": "redis://127.0.0.1:6379/0",
    "devices": [{"id": "sim0", "kind": "sim", "vram": "8GiB"}],
    "allowed_hosts": ["gpu-box.lan"],
    "external": [
        {
            "name": "comfyui",
            "match": "ComfyUI/main.py",
            "vram": "12GiB",
            "busy_url": "http://127.0.0.1:8188/queue",
            "free": 'POST http://127.0.0.1:8188/free {"unload_models": true, "free_memory": true}',
        }
    ],
    "llama_server": "~/bin/llama-server",
    "id": "my-model",
    "aliases": ["gpt-*"],
    "category": "llm",
    "path": "../models/my-model-q4_k_m.gguf",
    "mmproj": "../models/mmproj-my-model-f16.gguf",
    "vram": "6GiB",
    "context": 8192,
    "gpu_layers": 99,
    "extra_args": [],
    "env": {},
    "options": {},
    "stay_warm_s": "10m",
    "min_residency_s": "1m",
    "chat_template": "chatml",
}
_SIZES = {"reserve"}
_LEFT_OUT = {"vram_mb"}
"""Keys that only say otherwise what another one says."""


def config_template(models_dirs: tuple[Path, ...] = ()) -> str:
    """The text of a model-boss.yaml; `models_dirs` stand in it uncommented."""
    written: dict[str, object] = {"models_dirs": [str(path) for path in models_dirs]} if models_dirs else {}
    return _HEAD + _keys(Settings, "", written)


def manifest_template() -> str:
    """The text of an example manifest, in which everything is a comment: it describes no model yet."""
    return _MANIFEST_HEAD + _keys(Manifest, "", {})


def _keys(model: type[BaseModel], indent: str, written: Mapping[str, object]) -> str:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        if field.exclude or name in _LEFT_OUT:
            continue
        lines.append("")
        prefix = f"{indent}# "
        lines += textwrap.wrap(field.description or "", 100, initial_indent=prefix, subsequent_indent=prefix)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            lines.append(f"#{indent}{name}:")
            lines += _keys(inner, f"{indent}  ", {}).strip("\n").splitlines()
        elif name in written:
            lines.append(f"{indent}{name}: {_flow(written[name])}")
        else:
            lines.append(f"#{indent}{name}: {_flow(_value(name, field))}")
    return "\n".join(lines) + "\n"


def _value(name: str, field: FieldInfo) -> object:
    default: Any = field.default
    if default is None or default == ():
        return _EXAMPLES[name]
    if name in _SIZES:
        return format_bytes(default)
    if isinstance(default, float) and default.is_integer():
        return int(default)
    return str(default) if isinstance(default, Path) else default


def _flow(value: object) -> str:
    """The value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")
