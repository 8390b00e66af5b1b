"""Addresses of stores: what they mean, and that nothing secret is ever told of them."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from gpuboss.settings import LedgerSettings, Timings
from gpuboss.store import Store
from gpuboss.store_routes import route_to
from gpuboss.store_url import shown

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:hunter2hunter2@box", "redis://box"),
        ("redis://me:hunter2hunter2@box:6380/3", "redis://box:6380/3"),
        ("redis://me:a@hunter2hunter2@box", "redis://box"),
        ("redis://me:hunter2hunter2/#?@box/1", "redis://box/1"),
        ("me:hunter2hunter2@box", "box"),
        ("redis://box?password=hunter2hunter2&db=4&username=hunter2hunter2", "redis://box?db=4"),
        (
            "rediss://box?ssl_ca_certs=/etc/ca.pem&ssl_password=hunter2hunter2",
            "rediss://box?ssl_ca_certs=/etc/ca.pem",
        ),
        ("unix://:hunter2hunter2@/run/kv.sock", "unix:///run/kv.sock"),
        (
            "redis+sentinel://me:hunter2hunter2@a:1,b:2/leases/0?sentinel_password=hunter2hunter2&ssl=true",
            "redis+sentinel://a:1,b:2/leases/0?ssl=true",
        ),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, expected: str) -> None:
    assert shown(url) == expected


def test_settings_and_stores_do_not_show_passwords() -> None:
    url = f"redis://me:{SECRET}@box/1?sentinel_password={SECRET}"
    settings = LedgerSettings(store_url=url)
    assert "store_url='redis://box/1'" in repr(settings)
    assert SECRET not in f"{settings!r} {settings}"
    store = Store(f"redis://me:{SECRET}@box/1", Timings())
    shown_parts = [repr(part) for part in (store, store._links, store._links._route, vars(store), vars(store._links))]
    assert SECRET not in " ".join(shown_parts)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://box", "must specify one of the following schemes"),
        ("box", "must specify one of the following schemes"),
        (f"redis://:{SECRET}/x@box", "written %2F"),
        (f"redis://:{SECRET}#x@box", "%23 for #"),
        (f"redis://:12#{SECRET}@box", "%23 for #"),
        (f"redis://:12?{SECRET}=x@box", "%23 for #"),
        (f"redis://:{SECRET}@box/x", "number of a database"),
        (f"redis://:{SECRET}@box?db=x", "Invalid value for 'db'"),
        (f"redis://:{SECRET}@box:99999", "Port out of range"),
        (f"redis://:{SECRET}@[::1", "Invalid IPv6"),
        (f"redis://:{SECRET}@box?sentinel_password={SECRET}", "no parameter 'sentinel_password'"),
        (f"redis://:{SECRET}@box?ssl_ca_certs=/etc/passwd", "belong to rediss://"),
        (f"rediss://:{SECRET}@box?ssl_ca_certs=/no/such.pem", "absolute path of a file we can read"),
        (f"rediss://:{SECRET}@box?ssl_certfile=pyproject.toml", "absolute path of a file we can read"),
        (f"rediss://:{SECRET}@box?ssl_cert_reqs=perhaps", "perhaps"),
        (f"unix://:{SECRET}@", "absolute path of a socket"),
        (f"unix://:{SECRET}@run/kv.sock", "absolute path of a socket"),
        (f"redis+sentinel://:{SECRET}@a:1,b:2", "must name Sentinels and a service"),
        (f"redis+sentinel://:{SECRET}@a,,b/leases", "must name Sentinels and a service"),
        (f"redis+sentinel://:{SECRET}@/leases", "must name Sentinels and a service"),
        (f"redis+sentinel://:{SECRET}@a/leases/x", "number of a database"),
        (f"redis+sentinel://:{SECRET}@a/leases?ssl=perhaps", "ssl must be true or false"),
        (f"redis+sentinel://:{SECRET}@a:x,b/leases", "host or port"),
        (f"redis+sentinel://:{SECRET}@a/leases?nonsense={SECRET}", "no parameter 'nonsense'"),
    ],
)
def test_an_address_that_names_no_store_is_explained_without_its_secrets(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        Store(url, Timings())
    assert SECRET not in "".join(traceback.format_exception(refused.value))


_PIECES = st.lists(
    st.sampled_from(["redis", "rediss", "unix", "+sentinel", "://", ":", "@", "/", "?", "#", "[", "]", "%2", ",", "="])
    | st.sampled_from(["db", "1", "box", "sentinel_password", "ssl", "true", "\u2100", "\u2488", "&", " "]),
    max_size=8,
)


@given(before=_PIECES, after=_PIECES)
def test_whatever_is_wrong_with_an_address_its_password_is_not_told(before: list[str], after: list[str]) -> None:
    url = f"redis://{''.join(before)}:{SECRET}{''.join(after)}@box/0"
    assert SECRET not in shown(url).partition("?")[0]
    told = ""
    try:
        told = route_to(url).shown.partition("?")[0]
    except ValueError as error:
        told = "".join(traceback.format_exception(error))
    assert SECRET not in told


async def test_a_plain_address_is_one_connection() -> None:
    for url, kind in (
        ("redis://me:pass%2Fword@box:6380/3", Connection),
        ("rediss://box?ssl_cert_reqs=none", SSLConnection),
        ("unix:///run/kv.sock?db=3", UnixDomainSocketConnection),
    ):
        (connection,) = await route_to(url).candidates()
        assert type(connection) is kind
        assert connection.retry._retries == 0, "redis-py would send a command twice by itself"
    (first,) = await route_to("redis://me:pass%2Fword@box:6380/3").candidates()
    assert (first.host, first.port, first.db, first.username, first.password) == ("box", 6380, 3, "me", "pass/word")


async def test_parameters_of_redis_py_that_are_ours_to_choose_are_ignored() -> None:
    (connection,) = await route_to(
        "redis://box?socket_timeout=1&protocol=3&max_connections=9&retry_on_timeout=1&db=2"
    ).candidates()
    assert (connection.socket_timeout, connection.protocol, connection.db) == (None, 2, 2)


async def test_certificates_are_read_once_for_all_connections_until_they_fail(tmp_path: Path) -> None:
    route = route_to("rediss://box")
    (first,), (second,) = await route.candidates(), await route.candidates()
    assert first.ssl_context is second.ssl_context
    assert (first.ssl_context.check_hostname, first.ssl_context.cert_reqs.name) == (True, "CERT_REQUIRED")
    route.forget()
    (third,) = await route.candidates()
    assert third.ssl_context is not first.ssl_context


def test_nothing_is_logged_of_an_address(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        Store(f"redis+sentinel://:{SECRET}@a,b,c/leases?sentinel_password={SECRET}", Timings())
    assert not caplog.records
