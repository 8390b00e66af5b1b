"""Comments of waiting streams, log lines, and the listening socket."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Iterator

import pytest
import structlog

from coordinator import logs
from coordinator.listen import CannotListen, listen, url_of
from coordinator.streaming import comment, pause_between_comments_s
from inference.admission import Progress
from inference.slot_state import SlotState


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress(3, 7, SlotState.IDLE, None), b": queued 3 of 7\n\n"),
        (Progress(3, 7, SlotState.IDLE, None, eta_s=11.2), b": queued 3 of 7, about 12 s\n\n"),
        (Progress(1, 7, SlotState.LOADING, 0.409, eta_s=3), b": loading 40%, about 3 s\n\n"),
        (Progress(1, 7, SlotState.LOADING, None, eta_s=0.0), b": loading, about 1 s\n\n"),
        (Progress(1, 1, SlotState.DRAINING, None), b": queued 1 of 1\n\n"),
        (Progress(1, 7, SlotState.LOADING, 0.409), b": loading 40%\n\n"),
        (Progress(1, 7, SlotState.LOADING, None), b": loading\n\n"),
    ],
)
def test_a_comment_says_where_the_stream_stands(progress: Progress, line: bytes) -> None:
    assert comment(progress) == line


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_root_logger")
def test_log_lines_are_json_on_one_line_and_blank_what_looks_secret() -> None:
    out = io.StringIO()
    logs.configure("info", out)
    structlog.get_logger("here").info("happened", api_key="k", prompt="p", note="a\nb", header="Bearer abc.def")
    logging.getLogger("gpuboss.keeper").warning("stdlib\nspeaks")
    logging.getLogger("uvicorn.error").info("Started server process")
    structlog.get_logger("here").debug("too quiet")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["event"], first["logger"], first["level"]) == ("happened", "here", "info")
    assert (first["api_key"], first["prompt"]) == ("[blanked]", "[blanked]")
    assert (first["note"], first["header"]) == ("a | b", "Bearer [blanked]")
    assert (second["event"], second["level"]) == ("stdlib | speaks", "warning")


@pytest.mark.usefixtures("_root_logger")
def test_a_terminal_gets_lines_for_people() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    logs.configure("debug", out)
    structlog.get_logger("here").debug("happened", model="robin")
    assert "happened" in out.getvalue()
    assert "{" not in out.getvalue()


def test_a_taken_port_names_the_address_the_holder_and_the_flag() -> None:
    with listen("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{port} is taken by process \d+ .*--port"):
            listen("127.0.0.1", port)


def test_an_address_that_is_not_ours_names_the_setting() -> None:
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1.*--host"):
        listen("192.0.2.1", 0)
    with pytest.raises(CannotListen, match="--host"):
        listen("no such name", 0)


def test_the_address_to_call() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listen("localhost", 0) as listener:
        assert listener.family is socket.AF_INET


@pytest.mark.parametrize(("waiting", "pause_s"), [(1, 1.0), (50, 1.0), (200, 4.0), (512, 10.0), (100_000, 10.0)])
def test_a_stream_is_told_once_a_second_and_in_a_crowd_every_ten_at_least(waiting: int, pause_s: float) -> None:
    assert pause_between_comments_s(waiting) == pause_s
