"""Who may speak to this server. `front.py` asks `Gate.check` before anything else looks at a request.

With an API key configured the key decides: browsers do not attach it by themselves, so neither a foreign web page nor a
rebound DNS name can use it. Without one this is a server on loopback that any web page could reach, therefore:
  1. the Host header must name us (DNS rebinding puts the attacker's name there);
  2. a request that changes something must not come from a page of another origin.
In both cases a body must say it is JSON: other kinds can be sent across origins without the browser asking first.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from hashlib import sha256

from starlette.types import Scope

from coordinator import request
from coordinator.errors import BadRequest, CrossSiteRefused, HostRefused, KeyRefused
from coordinator.exchange import Exchange

OPEN_PATHS = frozenset({"/health", "/health/ready"})
"""Say nothing but up or down; probes have no key."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OUR_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SINGLE = (b"host", b"authorization", b"content-type", b"content-length", b"origin", b"sec-fetch-site")
"""Headers of which a second one could make two readers see different requests."""


class UnsafeBind(Exception):
    """The configuration would open the broker to the network without a key; the message names the settings."""


def check_bind(host: str, *, loopback: bool, api_key: str | None) -> None:
    """Refuse to listen beyond this machine without a key.

    Raises:
        UnsafeBind
    """
    if api_key is None and not loopback:
        raise UnsafeBind(
            f"host is {host}, which other machines can reach, and there is no API key: set MODEL_BOSS_API_KEY, "
            "or set host (MODEL_BOSS_HOST, --host) to 127.0.0.1"
        )


def is_local(scope: Scope) -> bool:
    """Does the request come from this machine? A reverse proxy on it speaks for others; that cannot be told."""
    client, server = scope.get("client"), scope.get("server")
    if client is None or (server is not None and client[0] == server[0]):
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class Gate:
    """The checks every request passes; immutable."""

    def __init__(self, *, api_key: str | None, host: str, port: int, allowed_hosts: Iterable[str] = ()) -> None:
        self._digest = None if api_key is None else sha256(api_key.encode()).digest()
        self._names = _OUR_NAMES | {name.strip("[]").lower() for name in (host, *allowed_hosts)}
        # The usual spelling is found by one look-up; any other is taken apart.
        self._usual = frozenset(f"{name}:{port}".encode() for name in self._names)

    def check(self, exchange: Exchange) -> None:
        """Let the request pass, or raise.

        Raises:
            KeyRefused, HostRefused, CrossSiteRefused, MediaTypeRefused, BadRequest
        """
        headers = exchange.headers
        if len(headers) != len(exchange.scope["headers"]):
            _check_single(exchange.scope["headers"])
        changing = exchange.method not in _READING
        if self._digest is not None:
            if exchange.path not in OPEN_PATHS:
                self._check_key(headers.get(b"authorization", b""))
        else:
            host = headers.get(b"host", b"")
            if host not in self._usual:
                self._check_host(host)
            if changing and (b"origin" in headers or b"sec-fetch-site" in headers):
                _check_site(headers)
        if changing and has_body(headers) and not request.says_json(headers.get(b"content-type")):
            raise request.not_json(headers)

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, key = authorization.partition(b" ")
        # Digests are compared, so that the time taken tells nothing about the key, its length included.
        if not hmac.compare_digest(sha256(key.strip()).digest(), self._digest or b"") or scheme.lower() != b"bearer":
            said = "is not the one configured" if key else "is missing"
            raise KeyRefused(f"the API key {said}: send 'Authorization: Bearer KEY', KEY being MODEL_BOSS_API_KEY's")

    def _check_host(self, host: bytes) -> None:
        name = _host_name(host)
        if name not in self._names:
            raise HostRefused(
                f"the Host header names '{name[:80]}', which this server does not answer to: call it by "
                f"{', '.join(sorted(self._names))}, or add the name to allowed_hosts, or set MODEL_BOSS_API_KEY"
            )


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise BadRequest(f"the header {name.decode()} appears more than once", param=name.decode())


def _check_site(headers: Mapping[bytes, bytes]) -> None:
    origin = headers.get(b"origin")
    same = origin is None or origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
    if not same or headers.get(b"sec-fetch-site", b"none") not in {b"none", b"same-origin"}:
        shown = (origin or b"of another site").decode("latin-1")[:80]
        raise CrossSiteRefused(f"a web page ({shown}) sent this; set MODEL_BOSS_API_KEY and let it send the key")


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Does the request say that a body follows?"""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _host_name(host: bytes) -> str:
    """`localhost:8210` -> `localhost`, `[::1]:8210` -> `::1`."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")
