"""The error table: complete, consistent, and rendered as the SDKs expect."""

from __future__ import annotations

import json

import pytest

import gpuboss.errors
import inference.errors
from coordinator import errors

ROOTS = (errors.CallerError, inference.errors.InferenceError, gpuboss.errors.GpubossError)


def _tree(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


@pytest.mark.parametrize("cls", [cls for root in ROOTS for cls in _tree(root)])
def test_every_error_class_is_in_the_table(cls: type[Exception]) -> None:
    assert cls in errors.TABLE


def test_a_guard_that_would_find_a_missing_class() -> None:
    class Forgotten(inference.errors.InferenceError):
        """Not in the table."""

    assert Forgotten in _tree(inference.errors.InferenceError)
    assert Forgotten not in errors.TABLE
    assert errors.kind_of(Forgotten("x")).code == "internal_error"
    del Forgotten


@pytest.mark.parametrize("kind", errors.TABLE.values(), ids=lambda kind: kind.code)
def test_the_table_promises_nothing_the_sdks_would_misread(kind: errors.Kind) -> None:
    assert 400 <= kind.status < 600
    if kind.retry_after_s is not None:
        assert kind.status in (429, 502, 503, 504), "the SDKs ask again after these alone"
        assert 0 < kind.retry_after_s <= errors.MAX_RETRY_AFTER_S


def test_an_error_has_openais_shape() -> None:
    shown = errors.render(inference.errors.NoRoom("robin needs 5GiB; 2GiB are free, the rest is pinned"))
    assert shown.status == 503
    assert json.loads(shown.body) == {
        "error": {
            "message": "robin needs 5GiB; 2GiB are free, the rest is pinned",
            "type": "server_error",
            "code": "no_room",
            "param": None,
        }
    }
    assert (b"retry-after", b"10") in shown.headers


@pytest.mark.parametrize(("own_s", "sent"), [(None, b"5"), (0.2, b"1"), (12.4, b"13"), (3600.0, b"60")])
def test_retry_after_is_whole_seconds_up_to_a_minute(own_s: float | None, sent: bytes) -> None:
    shown = errors.render(inference.errors.QueueFull("full", retry_after_s=own_s))
    assert (b"retry-after", sent) in shown.headers


def test_what_is_pointless_to_repeat_says_so() -> None:
    shown = errors.render(inference.errors.WillNeverFit("robin needs 40GiB; sim0 has 8GiB"))
    assert shown.headers == [(b"x-should-retry", b"false")]


@pytest.mark.parametrize(
    "error", [ValueError("/etc/secret"), inference.errors.IllegalTransition("story"), gpuboss.errors.StaleFence("x")]
)
def test_internal_errors_tell_nothing(error: Exception) -> None:
    shown = errors.render(error)
    assert shown.status == 500
    assert json.loads(shown.body)["error"]["message"] == errors.HIDDEN


def test_the_field_at_fault_is_named() -> None:
    assert json.loads(errors.render(errors.BadRequest("no", param="x_priority")).body)["error"]["param"] == "x_priority"
    assert json.loads(errors.render(inference.errors.ModelNotFound("no")).body)["error"]["param"] == "model"


def test_an_event_is_one_line() -> None:
    event = errors.sse_event(inference.errors.EngineDied("ended\nin two lines"))
    assert event.startswith(b'data: {"error":')
    assert event.count(b"\n") == 2
    assert event.endswith(b"\n\n")


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"error": "text"}', b'{"error": {"message": "x"}}'])
def test_an_engines_answer_that_is_no_error_object_is_left_alone(body: bytes) -> None:
    assert errors.from_engine(500, body) == body


def test_an_engines_error_keeps_its_words_and_gets_our_code() -> None:
    theirs = json.dumps({"error": {"code": 500, "message": "Jinja", "type": "server_error"}}).encode()
    ours = json.loads(errors.from_engine(500, theirs))["error"]
    assert ours == {"message": "Jinja", "type": "server_error", "code": "engine_error", "param": None}


def test_an_errors_numbers_stand_beside_its_message_and_replace_nothing() -> None:
    facts = {"position": 3, "waiting": 7, "eta_s": None, "code": "mine"}
    error = json.loads(
        errors.render(inference.errors.QueueTimeout("waited 300 s", retry_after_s=900, facts=facts)).body
    )["error"]
    assert (error["position"], error["waiting"], error["eta_s"]) == (3, 7, None)
    assert (error["message"], error["code"], error["param"]) == ("waited 300 s", "queue_timeout", None)
