"""Writes docs/configuration.md from the models that check the files people write, so that it cannot drift from them.

Run it after a change of a setting; tests/unit/coordinator/test_configuration_page.py says when that was forgotten.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402 - after the path to the packages
from pydantic.fields import FieldInfo  # noqa: E402 - as above

from coordinator.config_files import VARIABLES  # noqa: E402 - as above
from coordinator.settings import Settings  # noqa: E402 - as above
from gpuboss.priority import name_of  # noqa: E402 - as above
from gpuboss.units import format_bytes  # noqa: E402 - as above
from inference.manifest import Manifest  # noqa: E402 - as above

PAGE = ROOT / "docs" / "configuration.md"

HEAD = """\
# Configuration

`model-boss init` writes a commented file, `model-boss config check` finds mistakes, `model-boss config show` prints
what is in force and where it comes from, `model-boss config schema` gives a JSON schema to editors. Everything is
optional.

The file is the first of: `--config FILE`, the file that `MODEL_BOSS_CONFIG` names, `./model-boss.yaml`,
`$XDG_CONFIG_HOME/model-boss/model-boss.yaml`, `/etc/model-boss/model-boss.yaml`. The environment wins over the file,
and the command line over both. Paths in a file start at that file. Durations are seconds or texts like `30s`, `5m`,
`2h`; sizes are bytes or texts like `512MiB`, `20GiB`. An unknown key is an error that names the nearest known one.

This page is written by `python scripts/write_configuration_page.py`.
"""
SETTINGS = """
## model-boss.yaml
"""
ENVIRONMENT = """
## Environment

| variable | key |
|---|---|
"""
KEY = """
`MODEL_BOSS_API_KEY` is the key that callers must send. It stands in no file; without it the broker listens on loopback
alone.
"""
MANIFEST = """
## A manifest

Models need none. One YAML file per model, in the folder that `manifests` names, says what shall be different for it.
"""
TABLE = """
| key | default | meaning |
|---|---|---|
"""
SIZES = {"reserve"}


def page() -> str:
    """The text of docs/configuration.md."""
    variables = "".join(
        f"| `{name}` | `{'.'.join(map(str, place))}` |\n"
        for name, place in sorted(VARIABLES.items())
        if place != ("api_key",)
    )
    settings, manifest = "".join(_rows(Settings, "")), "".join(_rows(Manifest, ""))
    return HEAD + SETTINGS + TABLE + settings + ENVIRONMENT + variables + KEY + MANIFEST + TABLE + manifest


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        inner, listed = _section(field.annotation)
        if inner is None or listed:
            meaning = " ".join(filter(None, (field.description, _bounds(field), _choices(field.annotation))))
            yield f"| `{prefix}{name}` | {_default(name, field)} | {meaning.replace('|', '/')} |\n"
        if inner is not None:
            yield from _rows(inner, f"{prefix}{name}{'[]' if listed else ''}.")


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The keys inside, and whether there is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in typing.get_args(annotation):
        inner, _ = _section(part)
        if inner is not None:
            return inner, True
    return None, False


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.get_default(call_default_factory=True)
    match default:
        case None | () | [] | "":
            return "none"
        case dict() if not default:
            return "none"
        case bool():
            return f"`{str(default).lower()}`"
        case int() if name in SIZES:
            return f"`{format_bytes(default)}`"
        case int() if name == "priority":
            return f"`{name_of(default)}`"
        case float():
            return f"`{default:g}`"
    return f"`{default}`"


def _bounds(field: FieldInfo) -> str:
    """`(at least 0, at most 3600)`, from the constraints of the field."""
    words = (("ge", "at least"), ("gt", "more than"), ("le", "at most"))
    told = [
        f"{text} {getattr(bound, name):.10g}"
        for name, text in words
        for bound in field.metadata
        if hasattr(bound, name)
    ]
    return f"({', '.join(told)})" if told else ""


def _choices(annotation: Any) -> str:
    if typing.get_origin(annotation) is not typing.Literal:
        return ""
    return f"(one of {', '.join(f'`{choice}`' for choice in typing.get_args(annotation))})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
