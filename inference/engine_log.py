"""What an engine said: one file per slot in the state directory, and the one before it.

Written by the engine itself, through the descriptor that its shim opens for it; kept short and read by `engine_run.py`
(why did it fail?), shown by `model-boss logs`. A slot's logs take `2 * ROTATE_BYTES` of the disk, and for a moment what
the engine writes between two looks, which are a second apart. A disk that is full costs log lines and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import structlog

__all__ = ["ROTATE_BYTES", "EngineLog", "last_lines", "log_path", "rotate", "without_paths"]

ROTATE_BYTES = 8 << 20
"""Of a log; then it becomes `.1`, and the one before that is gone."""
_TAIL_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
_DIRECTORIES = re.compile(r"(?:(?<=unix://)|(?<![\w.:/]))(?:/[\w.@+~-]+)*/(?=[\w.@+~-])")

_log = structlog.get_logger(__name__)


class EngineLog:
    """The log of one slot during one life of its engine. Used by one task."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0
        """Where this life's lines begin."""
        self._rotated = False
        """They began in the file before."""

    async def begin(self) -> None:
        """A life begins: what was said before is none of its words."""
        await self.keep_short()
        self._start, self._rotated = _size(self.path), False

    async def keep_short(self) -> None:
        """Rotate when it is due; to be called every second or so."""
        if _size(self.path) >= ROTATE_BYTES:
            await asyncio.to_thread(rotate, self.path)
            self._start, self._rotated = 0, True

    def last_lines(self, count: int) -> list[str]:
        """The last lines of this life."""
        lines = last_lines(self.path, count, since_bytes=self._start)
        if self._rotated and len(lines) < count:
            lines = last_lines(_older(self.path), count - len(lines)) + lines
        return lines


def log_path(log_dir: Path, slot_id: str) -> Path:
    """The log of the slot's engine. Two ids never share one."""
    # Ids hold no '+', '@' or '='; '/', ':' and '#' are what may not stand in names or addresses of files everywhere.
    return log_dir / f"engine-{slot_id.replace('/', '+').replace(':', '@').replace('#', '=')}.log"


def rotate(path: Path) -> None:
    """Bring a log that is too long down to nothing; its engine may be writing, and goes on at the new end."""
    if _size(path) < ROTATE_BYTES:
        return
    older = _older(path)
    try:
        _copy_end(path, older)
    except OSError as error:  # the disk is full, most likely: room comes first
        _log.warning("engine_log_lost", log=path.name, error=error.strerror)
        with contextlib.suppress(OSError):
            older.unlink()
    # Not renamed: the engine's descriptor appends to this file, whatever it is called.
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def _copy_end(path: Path, older: Path) -> None:
    """Copy the last `ROTATE_BYTES`: an engine that writes fast may be far beyond them."""
    with path.open("rb") as log, open(older, "wb", opener=_private) as copy:
        log.seek(-ROTATE_BYTES, os.SEEK_END)
        left = ROTATE_BYTES
        while left > 0 and (chunk := log.read(min(left, _CHUNK_BYTES))):
            left -= copy.write(chunk)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_lines(path: Path, count: int, *, since_bytes: int = 0) -> list[str]:
    """The last lines of a log, of those after its first `since_bytes`; empty when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            start = max(since_bytes if since_bytes <= size else 0, size - _TAIL_BYTES)
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-count:]


def without_paths(text: str, known: Path | None = None) -> str:
    """The text with every directory left out, for callers who may not know where things lie.

    A `known` path is recognised even with spaces in it.
    """
    if known is not None:
        text = re.sub(rf"(?<![\w.:/]){re.escape(str(known))}", known.name.replace("\\", r"\\"), text)
    return _DIRECTORIES.sub("", text)
