"""Whether an engine that runs is still what its model's definition would start: everything that is passed to it, and
the files it is made of, in one word.

Taken by `engine_run.py` when it starts an engine, and by `slot.py` when one is to be adopted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuboss.devices import Device
from inference.backends import Backend, Launch
from inference.events import Shares
from inference.model import Model

__all__ = ["fingerprint"]

_NO_SOCKET, _NO_HOME = Path("engine.sock"), Path("engine-home")
"""In the place of the socket, which like the key is another for every engine, and of a folder: they define nothing."""


def fingerprint(model: Model, backend: Backend, binary: Path, shares: Shares, devices: tuple[Device, ...]) -> str:
    """Changes with arguments, environment, leased devices, program and model files (path, size, time of change).

    Raises:
        ModelBroken: the manifest says what the backend cannot do.
    """
    launch = Launch(binary, socket=_NO_SOCKET, api_key="", shares=shares, devices=devices, home=_NO_HOME)
    command = backend.command(model, launch)
    defined = {
        "backend": model.backend,
        "argv": command.argv,
        "env": sorted(command.env.items()),
        "files": sorted(set(_files([str(model.path), str(model.mmproj or ""), *command.argv]))),
        "bytes": model.file_bytes,  # of a split file: all its parts
    }
    return hashlib.sha256(json.dumps(defined).encode()).hexdigest()


def _files(words: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Those words that name files, with size and time of change."""
    for word in words:
        if word.startswith("/"):
            try:
                status = os.stat(word)  # noqa: PTH116 (an argument may be no path, and too long for one)
            except (OSError, ValueError):
                continue
            yield word, status.st_size, status.st_mtime_ns
