"""The `x_...` fields and their headers."""

from __future__ import annotations

import difflib
from dataclasses import fields

import pytest

from coordinator import extensions
from coordinator.errors import BadRequest
from coordinator.extensions import Extensions


def test_a_request_without_extensions_costs_nothing() -> None:
    headers = [(b"host", b"x"), (b"x-request-id", b"1")]
    assert extensions.parse({"model": "robin", "messages": []}, headers) is extensions.NONE


@pytest.mark.parametrize(("value", "priority"), [("urgent", 1), ("batch", 50), (0, 0), (1000, 1000), ("17", 17)])
def test_a_priority_is_a_class_or_a_number(value: object, priority: int) -> None:
    assert extensions.parse({"x_priority": value}, []).priority == priority


@pytest.mark.parametrize("value", ["soon", "x" * 65, -1, 1001, 1.5, True, None, [5], {}])
def test_another_priority_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(BadRequest, match="x_priority") as caught:
        extensions.parse({"x_priority": value}, [])
    assert caught.value.param == "x_priority"
    assert "one of urgent (1)" in str(caught.value)
    assert "True" not in str(caught.value), "Python's word for it"


@pytest.mark.parametrize(("value", "seconds"), [(0, 0.0), (2.5, 2.5), ("60", 60.0)])
def test_stay_warm_is_seconds(value: object, seconds: float) -> None:
    assert extensions.parse({"x_stay_warm_s": value}, []).stay_warm_s == seconds


@pytest.mark.parametrize("value", [-1, "long", float("inf"), "nan", True, None, 8 * 86400, 10**400])
def test_another_stay_warm_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="x_stay_warm_s"):
        extensions.parse({"x_stay_warm_s": value}, [])


@pytest.mark.parametrize(("value", "seconds"), [(0.5, 0.5), (86400, 86400.0), ("60", 60.0)])
def test_a_budget_is_seconds_of_work(value: object, seconds: float) -> None:
    assert extensions.parse({"x_budget_s": value}, []).budget_s == seconds


@pytest.mark.parametrize("value", [0, -1, 86401, "much", float("nan"), True, None])
def test_another_budget_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="x_budget_s") as caught:
        extensions.parse({"x_budget_s": value}, [])
    assert caught.value.param == "x_budget_s"


@pytest.mark.parametrize(("value", "seconds"), [(0, 0.0), (60, 60.0), ("2.5", 2.5)])
def test_a_cooldown_is_seconds(value: object, seconds: float) -> None:
    assert extensions.parse({"x_cooldown_s": value}, []).cooldown_s == seconds


@pytest.mark.parametrize("value", [-1, 3601, "long", None])
def test_another_cooldown_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="x_cooldown_s"):
        extensions.parse({"x_cooldown_s": value}, [])


@pytest.mark.parametrize("field", ["x_client_id", "x_session_id"])
@pytest.mark.parametrize("value", ["", "x" * 129, "two\nlines", 7, None])
def test_an_id_is_short_printable_text(field: str, value: object) -> None:
    found = extensions.parse({field: "küche 1"}, [])
    assert "küche 1" in (found.client_id, found.session_id)
    with pytest.raises(BadRequest, match=field):
        extensions.parse({field: value}, [])


def test_headers_say_the_same_and_the_body_wins() -> None:
    headers = [(b"x-boss-client-id", b"header"), (b"x-boss-priority", b"high"), (b"x-boss-stay-warm-s", b"9")]
    headers += [(b"x-boss-budget-s", b"7"), (b"x-boss-cooldown-s", b"3"), (b"x-boss-session-id", b"talk")]
    assert extensions.parse({}, headers) == Extensions("header", 5, 9.0, 7.0, 3.0, "talk")
    assert extensions.parse({"x_client_id": "body"}, headers) == Extensions("body", 5, 9.0, 7.0, 3.0, "talk")


@pytest.mark.parametrize("name", ["x_prioritty", "x_foo", "x_", "x_client-id"])
def test_an_unknown_field_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(BadRequest, match="x_priority" if name.startswith("x_pri") else "x_"):
        extensions.parse({name: 1}, [])


def test_what_is_millions_long_is_neither_searched_nor_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for names near to one of 4 MB took a second and a half, in which nobody else was answered."""
    searched: list[int] = []

    def search(word: str, *_: object, **__: object) -> list[str]:
        searched.append(len(word))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", search)
    fields: list[dict[str, object]] = [
        {f"x_{'k' * 100_000}": 1},
        {"x_priority": "9" * 100_000},
        {"x_priority": [1] * 100_000},
    ]
    for body in fields:
        with pytest.raises(BadRequest) as refusal:
            extensions.parse(body, [])
        assert len(refusal.value.message) < 300
        assert len(refusal.value.param or "") < 100
    assert max(searched) <= extensions.LONGEST_FIELD


def test_an_unknown_header_is_refused_too() -> None:
    with pytest.raises(BadRequest, match="x-boss-task"):
        extensions.parse({}, [(b"x-boss-task", b"summary")])


def test_every_field_is_described() -> None:
    assert {field.name for field in fields(Extensions)} == extensions.FIELDS.keys()
    assert all(field.words.endswith(".") and field.schema for field in extensions.FIELDS.values())


def test_the_engine_sees_none_of_it() -> None:
    assert extensions.without({"x_priority": 1, "model": "robin", "max_tokens": 5}) == {
        "model": "robin",
        "max_tokens": 5,
    }
