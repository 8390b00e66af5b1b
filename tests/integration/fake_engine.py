"""A tiny engine to build: a cmake project whose steps tell what they do and wait where a test wants them to.

`python -m tests.integration.fake_engine DIRECTORY` builds it as `model-boss engines install` would, printing a line for
each report. In the directory: `steps` has a line for each step run, `gate` lets the second step go on.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from inference.engines import errors
from inference.engines.accelerator import Accelerator
from inference.engines.build import Order, install
from inference.engines.machine import machine_tag
from inference.engines.progress import Progress, Report
from inference.engines.recipe import Recipe

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(fake NONE)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_custom_command(OUTPUT one COMMAND echo one >> @HERE@/steps && touch one)
add_custom_command(OUTPUT two DEPENDS one COMMAND sh @HERE@/wait.sh && touch two)
add_custom_command(OUTPUT three DEPENDS two
  COMMAND echo three >> @HERE@/steps && cp @HERE@/program bin/llama-server && touch three)
add_custom_target(llama-server DEPENDS three)
"""

WAIT = """
echo two >> @HERE@/steps
echo $$ > @HERE@/waiter
while ! test -e @HERE@/gate; do sleep 0.02; done
test ! -s @HERE@/gate || { echo "two.cpp:1:1: error: $(cat @HERE@/gate)" >&2; exit 1; }
"""

PROGRAM = "#!/bin/sh\necho 'version: 0.5.0-dev (build 0, commit 0c1e570)'\n"


class Tree:
    """Writes the project; a `Source`."""

    def __init__(self, here: Path) -> None:
        self.here = here

    def prepare(self, work: Path, log: Path, report: Report) -> Path:
        (self.here / "wait.sh").write_text(WAIT.replace("@HERE@", str(self.here)))
        (self.here / "program").write_text(PROGRAM)
        (self.here / "program").chmod(0o755)
        tree = work / "source"
        if not tree.exists():
            tree.mkdir()
            (tree / "CMakeLists.txt").write_text(CMAKE.replace("@HERE@", str(self.here)))
        return tree


def order(here: Path, *, force: bool = False) -> Order:
    """The order to build the project in `here`."""
    recipe = Recipe("9.9", Accelerator.CPU, (), ("llama-server",), (), machine_tag())
    return Order(recipe, Tree(here), force=force)


def main() -> int:
    """Build, and print what happens."""
    # A shell that starts the tests in the background has them ignore Ctrl-C, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def report(progress: Progress) -> None:
        print(progress.stage, progress.text, flush=True)

    try:
        print("done", install(order(Path(sys.argv[1])), report).binary, flush=True)
    except errors.InstallError as error:
        print("failed", error.message, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
