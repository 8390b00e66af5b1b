"""Find the configuration and put it together: file, then environment, then command line; the last one wins.

Called by every command of `cli/` and by the tests. Each problem is reported where its value was written, all of
them at once; the reading itself is `inference/yaml_files.py`, the wording `inference/validation.py`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.settings import Settings
from inference.validation import validate
from inference.yaml_files import BadInput, Document, Place, Problem, display, read_document

__all__ = ["CONFIG_NAME", "BadInput", "Loaded", "Problem", "find_config", "load_settings", "usual_places"]

CONFIG_NAME = "model-boss.yaml"

VARIABLES: Mapping[str, Place] = {
    "GPUBOSS_DEVICES": ("devices",),
    "GPUBOSS_STATE_DIR": ("state_dir",),
    "GPUBOSS_URL": ("store",),
    "MODEL_BOSS_API_KEY": ("api_key",),
    "MODEL_BOSS_HOST": ("host",),
    "MODEL_BOSS_LLAMA_SERVER": ("engines", "llama_server"),
    "MODEL_BOSS_MODELS_DIRS": ("models_dirs",),
    "MODEL_BOSS_PORT": ("port",),
    "MODEL_BOSS_STATE_DIR": ("state_dir",),
}
"""Environment variables, and the key each of them sets; of two for the same key the later one here wins."""

_FLAGS: Mapping[str, str] = {"models_dirs": "models-dir", "devices": "device"}
"""Flags that are given once per item of a list and so are called by the singular."""

_PATHS = {("state_dir",), ("manifests",), ("engines", "llama_server")}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration and where it came from."""

    settings: Settings
    file: Path | None
    """The file that was read; None when there is none and everything is a default."""
    origins: Mapping[Place, str]
    """What set each key that is not at its default: `model-boss.yaml:3`, `MODEL_BOSS_PORT` or `--port`."""

    def origin(self, key: str) -> str:
        """What set a key such as `queue.max_waiting`; `default` when nothing did."""
        return self.origins.get(tuple(key.split(".")), "default")


def find_config(explicit: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The configuration file: the one asked for, `MODEL_BOSS_CONFIG`, ./, XDG, /etc; None when there is none.

    Raises `BadInput` when a file that somebody named does not exist.
    """
    for name, given in (("--config", explicit), ("MODEL_BOSS_CONFIG", environ.get("MODEL_BOSS_CONFIG"))):
        if given:
            path = cwd / Path(given).expanduser()
            if not path.exists():
                raise BadInput((Problem(name, None, f"{path} does not exist"),))
            return path
    return next((path for path in usual_places(environ, cwd) if path.is_file()), None)


def load_settings(
    config: Path | None = None,
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Loaded:
    """The settings; `flags` are keys (`port`, `engines.llama_server`) with what the command line gave, None if nothing.

    Raises `BadInput` with everything that is wrong, in the file, the environment and the flags.
    """
    cwd = cwd or Path.cwd()
    file = find_config(config, environ, cwd)
    document = read_document(file) if file else Document(cwd / CONFIG_NAME, {}, {})
    data = copy.deepcopy(dict(document.data))
    if "api_key" in data:
        message = "api_key: keys do not belong into this file; set the environment variable MODEL_BOSS_API_KEY"
        raise BadInput((Problem(display(document.path), document.line_of(("api_key",)), message),))
    origins = {place: f"{display(document.path)}:{line}" for place, line in document.lines.items()}
    written: dict[Place, str] = {}
    for source, place, value in (*_from_environment(environ), *_from_flags(flags or {})):
        _put(data, place, _absolute(place, value, cwd))
        written[place] = origins[place] = source

    def locate(place: Place) -> tuple[str, int | None]:
        for length in range(len(place), 0, -1):
            if place[:length] in written:
                return written[place[:length]], None
        return display(document.path), document.line_of(place)

    settings = validate(data, Settings, locate, context={"base": document.path.parent.absolute()})
    return Loaded(settings, file, origins)


def usual_places(environ: Mapping[str, str], cwd: Path) -> tuple[Path, ...]:
    """Where a configuration file is looked for when nobody names one, first place first."""
    user = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return (cwd / CONFIG_NAME, user / "model-boss" / CONFIG_NAME, Path("/etc/model-boss") / CONFIG_NAME)


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Place, object]]:
    for name, place in VARIABLES.items():
        text = environ.get(name, "").strip()
        if not text:
            continue
        match place:
            case ("models_dirs",):
                yield name, place, [folder for folder in text.split(os.pathsep) if folder]
            case ("port",):
                yield name, place, int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
            case _:
                yield name, place, text


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[str, Place, object]]:
    for key, value in flags.items():
        if value is not None:
            name = _FLAGS.get(key) or key.replace("_", "-").replace(".", "-")
            yield f"--{name}", tuple(key.split(".")), value


def _absolute(place: Place, value: object, cwd: Path) -> object:
    """Paths from the environment and the command line start where the program does, not at the file."""
    if place in _PATHS and isinstance(value, str | Path):
        return str(cwd / Path(value).expanduser())
    if place == ("models_dirs",) and isinstance(value, list | tuple):
        return [str(cwd / Path(folder).expanduser()) for folder in value]
    return value


def _put(data: dict[str, Any], place: Place, value: object) -> None:
    for key in place[:-1]:
        inner = data.get(str(key))
        data[str(key)] = data = inner if isinstance(inner, dict) else {}
    data[str(place[-1])] = value
