"""The per-user cache of built engines: `~/.cache/model-boss/engines/llama-server/<version>-<options hash>/`.

    <key>/bin/...        the programs
    <key>/build.json     what they are (`Installed`); its time of change says which one was chosen last
    <key>/build.log      how they came about
    .work/<key>/         a build under way or interrupted; the next try goes on there
    .lock                held by whoever builds

Written by `build.py`, read by `resolve.py` and `engines list`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from inference.engines.machine import machine_tag


@dataclass(frozen=True, slots=True)
class Installed:
    """One built engine."""

    directory: Path
    version: str
    """Of the source, as in the recipe."""
    accelerator: str
    machine: str
    """`machine_tag()` where it was built; it runs only on machines of the same tag."""
    reported: str
    """What the program itself says its version is."""
    build_s: float
    """Seconds the build took."""

    @property
    def binary(self) -> Path:
        """The llama-server."""
        return self.directory / "bin" / "llama-server"

    @property
    def fits_here(self) -> bool:
        """Built on a machine like this one, and still complete."""
        return self.machine == machine_tag() and os.access(self.binary, os.X_OK)


def engines_dir() -> Path:
    """Return the directory of built llama-servers; follows XDG_CACHE_HOME, and need not exist yet."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if named.startswith("/") else Path.home() / ".cache"  # the XDG rules: relative ones are ignored
    return base / "model-boss" / "engines" / "llama-server"


def installed() -> list[Installed]:
    """All built engines, the one chosen last first. A directory without a readable build.json is not one."""
    found: list[tuple[float, Installed]] = []
    for note in engines_dir().glob("[!.]*/build.json"):
        try:
            values = json.loads(note.read_text())
            found.append((note.stat().st_mtime, Installed(directory=note.parent, **values)))
        except (OSError, ValueError, TypeError):
            continue  # removed or damaged by hand: as good as not there, and `install` builds it anew
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def current(version: str) -> Installed | None:
    """Return the engine of this version that runs here; of several, the one installed or chosen last."""
    return next((entry for entry in installed() if entry.version == version and entry.fits_here), None)


def find(key: str) -> Installed | None:
    """Return the engine of this key, if it is complete."""
    return next((entry for entry in installed() if entry.directory.name == key and entry.fits_here), None)


def choose(entry: Installed) -> None:
    """Make this engine the one that is used."""
    os.utime(entry.directory / "build.json")


def write_note(entry: Installed, directory: Path) -> None:
    """Write build.json into `directory` (which is renamed to `entry.directory` afterwards)."""
    values = {name: value for name, value in asdict(entry).items() if name != "directory"}
    (directory / "build.json").write_text(json.dumps(values, indent=2) + "\n")
