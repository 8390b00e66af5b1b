"""The command `gpuboss`: run programs under leases, and see who holds which device memory.

Entry point of the distribution's script. Every command is a module of this package, imported when it is asked for:
`run` (with `supervise`, `asking`, `child`, `job_control`, `terminal`, `leftovers`, `progress`), `views` (devices, ps),
`top`, `adopt`, `release`, `node`, `doctor`, `events`, `completion`. `parser` has the options and their help, `exits`
the exit codes, `words` what is said to people, `speech` the streams.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from gpuboss import errors
from gpuboss.cli.exits import Exit, exit_of, exit_of_signal
from gpuboss.cli.parser import parse
from gpuboss.cli.speech import complain, drop_unwritten, explain, prepare

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    prepare()
    try:
        return _answer(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:  # `gpuboss events | head`
        return exit_of_signal(signal.SIGPIPE)
    except OSError as error:
        complain(explain(error))
        return Exit.SYSTEM
    finally:
        drop_unwritten()


def _answer(arguments: Sequence[str]) -> int:
    try:
        return _perform(parse(arguments))
    except errors.GpubossError as error:
        complain(error.message)
        return exit_of(error)
    except ValueError as error:  # a request that makes no sense, told by whoever noticed
        complain(str(error))
        return Exit.USAGE
    except KeyboardInterrupt:
        return exit_of_signal(signal.SIGINT)
    finally:
        sys.stdout.flush()  # while a failure can still be told


def _perform(told: argparse.Namespace) -> int:
    match told.what:
        case "run":
            from gpuboss.cli.run import run

            return run(told)
        case "devices":
            from gpuboss.cli.views import devices

            return devices(told)
        case "ps":
            from gpuboss.cli.views import ps

            return ps(told)
        case "top":
            from gpuboss.cli.top import top

            return top(told)
        case "adopt":
            from gpuboss.cli.adopt import adopt

            return adopt(told)
        case "release":
            from gpuboss.cli.release import release

            return release(told)
        case "node":
            from gpuboss.cli.node import node

            return node(told)
        case "doctor":
            from gpuboss.cli.doctor import doctor

            return doctor(told)
        case "events":
            from gpuboss.cli.events import events

            return events(told)
        case "completion":
            from gpuboss.cli.completion import completion

            return completion(told)
        case _:
            raise AssertionError(told.what)
