"""Reading bodies and answering, without a server; and that no input, however odd, is an unforeseen error."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import errors, exchange, extensions
from coordinator.exchange import Answer, Exchange
from coordinator.hangup import CallerGone
from coordinator.request import parse_object
from coordinator.security import Gate
from inference.errors import EngineDied

Messages = list[dict[str, Any]]


class Server:
    """Gives the messages it has, then waits for ever, as a server does; keeps what is sent."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.sent: Messages = []

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def exchange(self, *headers: tuple[bytes, bytes], method: str = "POST") -> Exchange:
        scope = {"type": "http", "method": method, "path": "/x", "query_string": b"", "headers": list(headers)}
        return Exchange(scope, self.receive, self.send, b"req-1")


def _part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_pieces_is_put_together() -> None:
    server = Server(_part(b"a", True), _part(b"", True), _part(b"bc", False))
    assert await server.exchange().body() == b"abc"


async def test_a_body_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_DEADLINE_S", 0.02)
    with pytest.raises(errors.BodyTimeout, match="2 bytes came"):
        await Server(_part(b"ab", True)).exchange().body()


async def test_a_body_of_which_nothing_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_DEADLINE_S", 0.02)
    server = Server()
    asked = server.exchange()
    with pytest.raises(errors.BodyTimeout) as late:
        await asked.body()
    await asked.fail(late.value)
    assert (b"connection", b"close") in server.sent[0]["headers"], "or the caller could drip it for ever"


async def test_a_body_announced_as_too_large_is_not_waited_for() -> None:
    announced = (b"content-length", str(exchange.BODY_LIMIT_BYTES + 1).encode())
    with pytest.raises(errors.BodyTooLarge, match=str(exchange.BODY_LIMIT_BYTES)):
        await Server(_part(b"{", True)).exchange(announced).body()


@pytest.mark.parametrize("before", [[], [_part(b"{", True)]])
async def test_a_caller_who_hangs_up_in_the_body_is_gone(before: Messages) -> None:
    with pytest.raises(CallerGone):
        await Server(*before, {"type": "http.disconnect"}).exchange().body()


async def test_an_error_before_the_answer_is_a_response() -> None:
    server = Server()
    asked = server.exchange()
    await asked.fail(EngineDied("it ended"))
    start, body = server.sent
    assert (start["status"], body["more_body"], asked.answer) == (502, False, Answer.DONE)
    assert json.loads(body["body"])["error"]["code"] == "engine_died"
    assert (b"x-request-id", b"req-1") in start["headers"]


async def test_an_error_in_a_stream_of_events_is_an_event_and_ends_it() -> None:
    server = Server()
    asked = server.exchange()
    await asked.begin(200, [], events=True)
    await asked.fail(EngineDied("it ended"))
    assert server.sent[-1]["body"].startswith(b'data: {"error":')
    assert server.sent[-1]["more_body"] is False


async def test_an_error_in_the_middle_of_other_bytes_adds_none() -> None:
    server = Server()
    asked = server.exchange()
    await asked.begin(200, [])
    await asked.write(b"half")
    await asked.fail(EngineDied("it ended"))
    assert [message.get("body") for message in server.sent] == [None, b"half"], "the server cuts the connection"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_bad_json(raw: bytes) -> None:
    with contextlib.suppress(errors.BadJson):
        assert isinstance(parse_object(raw), dict)


def test_bad_json_does_not_carry_the_body_along() -> None:
    with pytest.raises(errors.BadJson) as caught:
        parse_object(b'{"canary')
    assert caught.value.__suppress_context__, "the parser's own error holds the whole body"
    assert "canary" not in caught.value.message


@given(st.dictionaries(st.sampled_from(["x_priority", "x_client_id", "x_stay_warm_s", "x_y", "model"]), JSON))
def test_any_extensions_are_understood_or_refused(body: dict[str, object]) -> None:
    try:
        found = extensions.parse(body, [])
    except errors.BadRequest:
        return
    assert 0 <= found.priority <= 1000
    assert found.stay_warm_s is None or found.stay_warm_s >= 0


_NAMES = st.sampled_from([b"host", b"origin", b"authorization", b"content-type", b"content-length", b"sec-fetch-site"])


@given(
    st.lists(st.tuples(_NAMES, st.binary() | st.sampled_from([b"localhost", b"Bearer k", b"application/json"]))),
    st.sampled_from(["GET", "POST", "BREW"]),
    st.sampled_from([None, "k"]),
)
def test_any_headers_pass_or_are_refused(headers: list[tuple[bytes, bytes]], method: str, key: str | None) -> None:
    gate = Gate(api_key=key, host="127.0.0.1", port=8210)
    try:
        gate.check(Server().exchange(*headers, method=method))
    except errors.CallerError:
        return
    names = dict(headers)
    assert b"k" in names[b"authorization"] if key else b"host" in names


class Stuck(Server):
    """Its caller reads nothing."""

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()


async def test_a_caller_that_reads_nothing_more_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SLOWEST_READ_S", 0.02)
    subject = Stuck().exchange()
    await subject.begin(200, [], events=True)
    with pytest.raises(CallerGone):
        await subject.write(b"data: {}\n\n")
