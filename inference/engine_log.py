"""What an engine said: one file per model in the state directory, bounded in size.

Written by the engine itself, through the descriptor that its shim opens for it; kept short and read by `engine_run.py`
(why did it fail?), shown by `model-boss logs`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

__all__ = ["ROTATE_BYTES", "last_lines", "log_path", "rotate", "without_paths"]

ROTATE_BYTES = 8 << 20
"""Of a log; then it becomes `.1`, and the one before that is gone."""
_TAIL_BYTES = 64 << 10
_DIRECTORIES = re.compile(r"(?:(?<=unix://)|(?<![\w.:/]))(?:/[\w.@+~-]+)*/(?=[\w.@+~-])")


def log_path(log_dir: Path, model_id: str) -> Path:
    """The log of the model's engine. Two ids never share one."""
    # Ids hold no '+' or '@'; '/' and ':' are what may not stand in file names everywhere.
    return log_dir / f"engine-{model_id.replace('/', '+').replace(':', '@')}.log"


def rotate(path: Path) -> None:
    """Bring a log that is too long down to nothing; its engine may be writing, and goes on at the new end."""
    try:
        if path.stat().st_size < ROTATE_BYTES:
            return
    except FileNotFoundError:
        return
    older = path.with_name(path.name + ".1")
    shutil.copyfile(path, older)
    older.chmod(0o600)
    # Not renamed: the engine's descriptor appends to this file, whatever it is called.
    with path.open("r+b") as log:
        log.truncate(0)


def last_lines(path: Path, count: int, *, since_bytes: int = 0) -> list[str]:
    """The last lines of a log, of those after its first `since_bytes`; empty when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            start = max(since_bytes if since_bytes <= size else 0, size - _TAIL_BYTES)
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if line.strip()][-count:]


def without_paths(text: str, known: Path | None = None) -> str:
    """The text with every directory left out, for callers who may not know where things lie.

    A `known` path is recognised even with spaces in it.
    """
    if known is not None:
        text = re.sub(rf"(?<![\w.:/]){re.escape(str(known))}", known.name.replace("\\", r"\\"), text)
    return _DIRECTORIES.sub("", text)
