"""What is built, as a value: the pinned source, the options, and the hash that names the result in the cache.

Made by the `engines install` command, used by `build.py` and `cache.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from inference.engines.accelerator import Accelerator
from inference.engines.machine import machine_tag

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
"""The release of llama-cpp-python whose source archive carries the llama.cpp tree that is built."""
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
"""Of `llama_cpp_python-0.3.36.tar.gz`."""
ARCHIVE_BYTES = 76_589_250
COMMIT = "0c1e57098"
"""The llama.cpp commit in that archive."""

TARGETS = ("llama-server", "ggml-rpc-server", "llama-fit-params")
"""The programs that are built; the first is the one that is looked for."""

_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # one file that can be copied and renamed into place
    "-DGGML_RPC=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",  # engines listen on unix sockets and fetch nothing
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    # Without these two, the commit of whatever git repository holds the cache directory would be shown.
    f"-DLLAMA_BUILD_COMMIT={COMMIT}",
    "-DLLAMA_BUILD_NUMBER=0",
)

_COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAARCHS", "CUDAHOSTCXX", "HIPCXX")
"""Environment variables that cmake reads by itself and that change what comes out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a build's result is."""

    version: str
    """Of the source."""
    accelerator: Accelerator
    flags: tuple[str, ...]
    """Arguments of cmake."""
    targets: tuple[str, ...]
    """The programs to build."""
    environment: tuple[tuple[str, str], ...]
    """Compiler variables that are set, sorted by name."""
    machine: str
    """`machine_tag()` of the machine that builds."""

    @property
    def key(self) -> str:
        """The name of the result in the cache: version and the hash of everything else."""
        rest = json.dumps([self.accelerator, self.flags, self.targets, self.environment, self.machine])
        return f"{self.version}-{hashlib.sha256(rest.encode()).hexdigest()[:12]}"


def llama_server_recipe(
    accelerator: Accelerator, flags: tuple[str, ...] = (), environment: Mapping[str, str] = os.environ
) -> Recipe:
    """Return the recipe for this machine; `flags` are the accelerator's own cmake arguments."""
    variables = tuple((name, environment[name]) for name in sorted(_COMPILER_VARIABLES) if environment.get(name))
    return Recipe(VERSION, accelerator, (*_FLAGS, *flags), TARGETS, variables, machine_tag())
