"""What programs beside us are asked over HTTP: how it is written, and how their answers are read."""

from __future__ import annotations

import pytest

from inference.external_http import _says_yes, is_busy, perform
from inference.external_spec import Call, pattern_of


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("POST http://127.0.0.1:8188/free", Call("POST", "http://127.0.0.1:8188/free")),
        ("http://localhost/free", Call("POST", "http://localhost/free")),
        ("put https://gpu-box/api?x=1", Call("PUT", "https://gpu-box/api?x=1")),
        ('http://a/free {"x": true, "y": 1}', Call("POST", "http://a/free", '{"x": true, "y": 1}')),
        ('POST http://a/free {"x": true}', Call("POST", "http://a/free", '{"x": true}')),
    ],
)
def test_a_request_is_written_as_method_address_and_body(text: str, call: Call) -> None:
    assert Call.parse(text, default_method="POST") == call


@pytest.mark.parametrize(
    "text",
    [*("", "POST", "free", "POST free", "ftp://a/b", "POST file:///etc/passwd"), *("POST http://", "POST http://a:x/")],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1"):
        Call.parse(text, default_method="POST")


@pytest.mark.parametrize(
    ("answer", "busy"),
    [
        ({"queue_running": [], "queue_pending": []}, False),
        ({"queue_running": [["0", "id"]], "queue_pending": []}, True),
        ({"exec_info": {"queue_remaining": 0}}, False),
        ({"exec_info": {"queue_remaining": 2}}, True),
        ({"busy": False}, False),
        (True, True),
        ([], False),
        ({"status": "running"}, False),
        (None, False),
    ],
)
def test_an_answer_with_something_in_it_means_busy(answer: object, busy: bool) -> None:
    assert _says_yes(answer) is busy


@pytest.mark.parametrize(
    ("match", "line", "found"),
    [
        ("ComfyUI/main.py", "python /srv/ComfyUI/main.py --port 8188", True),
        ("ComfyUI.main", "python /srv/ComfyUI/main.py", False),
        (r"/ComfyUI.*--port 81\d\d/", "python /srv/ComfyUI/main.py --port 8188", True),
        ("/srv/ComfyUI", "python /srv/ComfyUI/main.py", True),
    ],
)
def test_a_command_line_is_matched_by_a_part_or_by_a_regular_expression(match: str, line: str, found: bool) -> None:
    assert bool(pattern_of(match).search(line)) is found


async def test_a_program_that_does_not_answer_says_nothing() -> None:
    nobody = Call("GET", "http://127.0.0.1:9/queue")
    assert await is_busy(nobody) is None
    assert "GET http://127.0.0.1:9/queue failed" in str(await perform(nobody))
