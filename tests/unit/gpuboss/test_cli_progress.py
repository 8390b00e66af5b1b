"""How `gpuboss run` speaks: over one line on a terminal, rarely elsewhere, not at all when it is to be quiet."""

from __future__ import annotations

import io
import logging

import pytest

from gpuboss.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def progress(
    stream: io.StringIO, *, quiet: bool = False, in_foreground: bool = True, clock: Clock | None = None
) -> Progress:
    return Progress(quiet=quiet, in_foreground=lambda: in_foreground, stream=stream, clock=clock or Clock())


def test_on_a_terminal_one_line_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    one = progress(stream)
    one.waiting("position 2 of 3", place=2)
    one.waiting("a reason that is longer than the terminal is wide", place=1)
    one.say("begins")
    assert stream.getvalue() == (
        "\r\x1b[Kgpuboss: waiting: position 2 of 3"
        "\r\x1b[Kgpuboss: waiting: a reason that is l..."
        "\r\x1b[Kgpuboss: begins\n"
    )


def test_elsewhere_a_line_is_told_when_the_place_changes_or_half_a_minute_has_passed() -> None:
    stream, clock = io.StringIO(), Clock()
    one = progress(stream, clock=clock)
    for now_s, text, place in ((0, "a", 2), (5, "b", 2), (29, "c", 2), (31, "d", 2), (32, "e", 1)):
        clock.now_s = now_s
        one.waiting(text, place=place)
    assert stream.getvalue().splitlines() == [f"gpuboss: waiting: {text}" for text in "ade"]
    assert one.told_to_wait


def test_a_background_job_does_not_draw_on_the_terminal() -> None:
    stream = Terminal()
    progress(stream, in_foreground=False).waiting("a", place=1)
    assert stream.getvalue() == "gpuboss: waiting: a\n"


def test_quiet_is_quiet_but_for_what_must_be_said() -> None:
    stream = Terminal()
    one = progress(stream, quiet=True)
    one.waiting("a", place=1)
    one.say("b")
    assert not stream.getvalue()
    assert not one.told_to_wait
    one.insist("c")
    assert stream.getvalue() == "gpuboss: c\n"


def test_the_librarys_warnings_are_told_in_the_same_voice() -> None:
    stream = Terminal()
    one = progress(stream)
    one.waiting("a", place=1)
    one.handle(logging.LogRecord("gpuboss.keeper_link", logging.WARNING, "", 0, "the keeper is %s", ("gone",), None))
    assert stream.getvalue().endswith("\r\x1b[Kgpuboss: the keeper is gone\n")


def test_nobody_reads_any_more() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress(Broken()).say("to nobody")
