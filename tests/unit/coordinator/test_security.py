"""Who may speak to the server, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import errors
from coordinator.exchange import Exchange
from coordinator.security import Gate, UnsafeBind, check_bind, is_local


def _exchange(method: str = "POST", path: str = "/v1/completions", **headers: str) -> Exchange:
    named = {"host": "127.0.0.1:8210"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }

    async def unused(*_: object) -> Any:
        raise AssertionError

    return Exchange(scope, unused, unused, b"req-1")


KEYLESS = Gate(api_key=None, host="127.0.0.1", port=8210, allowed_hosts=["Box.example", "[fe80::1]"])
KEYED = Gate(api_key="secret", host="0.0.0.0", port=8210)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8210", "localhost", "LOCALHOST:99", "[::1]:8210", "box.example:80", "localhost.", "[fe80::1]"]
)
def test_our_own_names_pass(host: str) -> None:
    KEYLESS.check(_exchange(host=host))


@pytest.mark.parametrize(
    "host", ["", "attacker.example", "localhost.attacker.example", "127.0.0.1.nip.io", "[::2]", "0.0.0.0:8210", "[::1"]
)
def test_other_names_do_not(host: str) -> None:
    if host == "[::1":
        KEYLESS.check(_exchange(host=host))  # no such name can be looked up, so nothing is gained by it
        return
    with pytest.raises(errors.HostRefused, match="allowed_hosts"):
        KEYLESS.check(_exchange(host=host))


def test_reading_from_another_origin_is_left_to_the_browser() -> None:
    KEYLESS.check(_exchange("GET", origin="https://attacker.example", sec_fetch_site="cross-site"))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "BREW"])
def test_changing_from_another_origin_is_refused(method: str) -> None:
    for headers in ({"origin": "http://127.0.0.1:3000"}, {"sec_fetch_site": "cross-site"}, {"origin": "null"}):
        with pytest.raises(errors.CrossSiteRefused):
            KEYLESS.check(_exchange(method, **headers))
    KEYLESS.check(_exchange(method, origin="http://127.0.0.1:8210", sec_fetch_site="same-origin"))
    KEYLESS.check(_exchange(method, sec_fetch_site="none"))


@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer  secret", "BEARER secret "])
def test_the_key_opens(authorization: str) -> None:
    KEYED.check(_exchange(authorization=authorization, host="anything", origin="https://ui.example"))


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Basic secret"])
def test_anything_else_does_not(authorization: str) -> None:
    with pytest.raises(errors.KeyRefused, match="MODEL_BOSS_API_KEY"):
        KEYED.check(_exchange(authorization=authorization))


def test_probes_need_no_key() -> None:
    KEYED.check(_exchange("GET", "/health"))
    KEYED.check(_exchange("GET", "/health/ready"))
    with pytest.raises(errors.KeyRefused):
        KEYED.check(_exchange("GET", "/health/../v1/models"))


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_a_body_that_says_it_is_json_passes(kind: str) -> None:
    KEYLESS.check(_exchange(content_type=kind, content_length="2"))


def test_a_body_that_says_something_else_does_not() -> None:
    for gate, headers in ((KEYLESS, {}), (KEYED, {"authorization": "Bearer secret"})):
        for length in ({"content_length": "2"}, {"transfer_encoding": "chunked"}):
            with pytest.raises(errors.MediaTypeRefused, match="text/plain"):
                gate.check(_exchange(content_type="text/plain", **length, **headers))
    KEYLESS.check(_exchange())


def test_a_second_host_is_refused() -> None:
    exchange = _exchange()
    exchange.scope["headers"].append((b"host", b"127.0.0.1:8210"))
    with pytest.raises(errors.BadRequest, match="host"):
        KEYLESS.check(exchange)


def test_repeated_headers_without_weight_pass() -> None:
    exchange = _exchange()
    exchange.scope["headers"] += [(b"accept", b"a"), (b"accept", b"b")]
    KEYLESS.check(exchange)


def test_listening_beyond_this_machine_needs_a_key() -> None:
    check_bind("127.0.0.1", loopback=True, api_key=None)
    check_bind("0.0.0.0", loopback=False, api_key="secret")
    with pytest.raises(UnsafeBind, match=r"0\.0\.0\.0.*MODEL_BOSS_API_KEY.*--host"):
        check_bind("0.0.0.0", loopback=False, api_key=None)


@pytest.mark.parametrize(
    ("client", "server", "local"),
    [
        (("127.0.0.1", 5), ("127.0.0.1", 8210), True),
        (("::1", 5), ("::1", 8210), True),
        (("192.168.1.7", 5), ("192.168.1.7", 8210), True),
        (("192.168.1.8", 5), ("192.168.1.7", 8210), False),
        (("testclient", 5), ("127.0.0.1", 8210), False),
        (None, ("127.0.0.1", 8210), True),
    ],
)
def test_which_requests_come_from_this_machine(client: object, server: object, local: bool) -> None:
    assert is_local({"type": "http", "client": client, "server": server}) is local
