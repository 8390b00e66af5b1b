"""`python -m gpuboss.cli`."""

import sys

from gpuboss.cli import main

if __name__ == "__main__":
    sys.exit(main())
