"""What can go wrong while an engine is installed.

    InstallError
    |- NoCompiler          no working C or C++ compiler (found out before anything is downloaded)
    |- NoBuildTools        cmake or ninja is missing and could not be fetched, or this Python has no pip
    |- AcceleratorMissing  the accelerator asked for cannot be built on this machine
    |- CacheNotWritable    the cache directory cannot be written
    |- NotEnoughSpace      the disk is too full, with numbers
    |- DownloadFailed      pip could not fetch the source
    |- HashMismatch        the source is not the pinned one
    '- BuildFailed         cmake, the compiler or the finished program failed; names the log

Raised by `build.py` and what it calls; `coordinator/cli/engines.py` prints `message` and `OTHER_WAYS`.
"""

from __future__ import annotations

OTHER_WAYS = (
    "Other ways to a llama-server:\n"
    "  - install one with a package manager (`brew install llama.cpp`, `nix profile install nixpkgs#llama-cpp`) "
    "and have it on PATH\n"
    "  - set MODEL_BOSS_LLAMA_SERVER=/path/to/llama-server (or `engines: {llama_server: ...}` in model-boss.yaml)\n"
    "  - build without an accelerator: `model-boss engines install llama-server --accelerator cpu`"
)
"""What to do when a build cannot succeed here; printed below every failure."""


class InstallError(Exception):
    """Base of all errors of this package; the message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NoCompiler(InstallError):
    """No working C or C++ compiler on this machine."""


class NoBuildTools(InstallError):
    """cmake or ninja is missing and could not be fetched, or this Python has no pip."""


class AcceleratorMissing(InstallError):
    """The accelerator asked for cannot be built on this machine."""


class CacheNotWritable(InstallError):
    """The cache directory cannot be written."""


class NotEnoughSpace(InstallError):
    """The disk is too full for the build."""


class DownloadFailed(InstallError):
    """pip could not fetch the source."""


class HashMismatch(InstallError):
    """The source is not the pinned one; nothing of it was run."""


class BuildFailed(InstallError):
    """cmake, the compiler or the finished program failed; the message names the log."""
