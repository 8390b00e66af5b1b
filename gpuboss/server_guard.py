"""Runs a command and kills it when standard input ends, as it does when the parent dies.

For systems without a parent-death signal. Started by `gpuboss.server` as `python -I -S server_guard.py COMMAND...` with
a pipe that nobody but the parent holds open. Standard library only.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the command; its exit code, or 128 + the signal that ended it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=_kill_at_end_of_input, args=(child,), name="death-pipe", daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _kill_at_end_of_input(child: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 4096):
        pass
    child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
