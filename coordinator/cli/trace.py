"""`model-boss trace`: takes down what requests a running broker gets, for `model-boss simulate`.

Registered by the package's `app`; follows `GET /api/v1/trace` (`coordinator/api/trace.py`) and writes what comes.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.link import ConfigOption, JsonOption, Link, LinkError, NoBroker, Refused, UrlOption, connect
from coordinator.cli.output import ExitCode, count, fail, print_json

if TYPE_CHECKING:
    from inference.simulation.trace_file import TraceWriter

SILENT_S = 60.0
"""A broker from which nothing comes for so long, not even a sign of life, is gone."""
PATH = "/api/v1/trace"


def trace(
    out: Annotated[Path, typer.Option(help="The file to write; packed if it ends in .gz. It must be new.")],
    duration: Annotated[
        str | None, typer.Option("--for", help='How long, such as "10m"; when left out, until Ctrl-C.')
    ] = None,
    names: Annotated[
        bool, typer.Option("--names", help="Keep the names of clients and sessions; else they become numbers.")
    ] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Record when which model is asked for, and how long that takes; never what is asked."""
    deadline_s = time.monotonic() + _seconds(duration) if duration is not None else None
    link = connect(url, config)
    counts: dict[str, int] = {"requests": 0, "lost": 0}
    problem: LinkError | None = None
    try:
        _record(link, out, names=names, deadline_s=deadline_s, counts=counts)
    except KeyboardInterrupt:
        pass
    except LinkError as error:
        problem = error
    if json:
        print_json({"file": str(out), **counts})
    else:
        lost = f", {counts['lost']} lost" if counts["lost"] else ""
        typer.echo(f"{count(counts['requests'], 'request')} recorded{lost}: {out}")
    if problem is not None:
        problem.end()


def _seconds(text: str) -> float:
    from gpuboss.units import parse_duration

    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        fail(f"--for: {error}", ExitCode.USAGE)


def _record(link: Link, out: Path, *, names: bool, deadline_s: float | None, counts: dict[str, int]) -> None:
    """Write every line that comes until the deadline.

    Raises:
        LinkError: no broker answers, it refuses, or it is gone.
    """
    writer: TraceWriter | None = None
    try:
        for line in _lines(link, f"{PATH}?names=true" if names else PATH, deadline_s):
            if writer is None:
                writer = _writer(out)
                if sys.stderr.isatty():
                    typer.echo(f"recording to {out}; Ctrl-C ends it", err=True)
            if not line.strip():
                continue
            writer.add(line)
            if line.startswith(b'{"lost":'):
                counts["lost"] += _lost(link, line)
            elif line.startswith(b'{"at_s":'):
                counts["requests"] += 1
    finally:
        if writer is not None:
            writer.close()


def _lost(link: Link, line: bytes) -> int:
    try:
        return int(line[len(b'{"lost":') :].strip(b"}\n "))
    except ValueError as error:
        raise NoBroker(f"what answers at {link.url} is not Model Boss: it lost {line[:40]!r}") from error


def _writer(out: Path) -> TraceWriter:
    from inference.simulation.trace_file import TraceWriter

    try:
        return TraceWriter(out)
    except FileExistsError:
        fail(f"{out} is there already; name a new file with --out", ExitCode.USAGE)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")


def _lines(link: Link, path: str, deadline_s: float | None) -> Iterator[bytes]:
    """What the broker says, line by line, until the deadline. Raises LinkError."""
    link.get("/api/v1/queue")  # tells in words what is wrong, if anything is
    with _following(link, path) as (sock, response):
        while True:
            left_s = SILENT_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                return
            sock.settimeout(min(left_s, SILENT_S))
            try:
                line = response.readline()
            except TimeoutError:
                if left_s < SILENT_S:
                    return
                raise NoBroker(f"nothing has come from {link.url} for {SILENT_S:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                raise NoBroker(f"the connection to {link.url} broke: {error}") from error
            if not line.endswith(b"\n"):
                raise NoBroker(f"the broker at {link.url} ended the recording; it is on its way out")
            yield line


@contextmanager
def _following(link: Link, path: str) -> Iterator[tuple[socket.socket, http.client.HTTPResponse]]:
    """An answer that does not end. Raises LinkError."""
    with closing(link.connection(SILENT_S)) as connection:
        try:
            connection.connect()
            sock = connection.sock
            response = link.send(connection, "GET", path)
            refusal = b"" if response.status == 200 else response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoBroker(f"no Model Boss answers at {link.url} any more ({error})") from error
        if response.status != 200:
            link.decode(response.status, refusal)
            raise Refused(f"the broker at {link.url} does not tell what it is asked: status {response.status}")
        yield sock, response
