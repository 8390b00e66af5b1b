"""`python -m inference.engines`: print the llama-server that is used. For the Makefile, where every millisecond shows.

Exit status: 0 printed, 1 there is none and one can be installed, 2 what the environment names is not a program.
"""

from __future__ import annotations

import sys

from inference.engines import find_llama_server
from inference.errors import EngineMissing


def main() -> int:
    """Print the path, or say what is wrong."""
    try:
        found = find_llama_server()
    except EngineMissing as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    if found is None:
        return 1
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
