"""A store's address as people may see it: where it is, without the secrets that open it.

Called wherever an address gets into a message, a log or a `repr`. Standard library only. What an address means is in
`gpuboss.store_routes`.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

__all__ = ["shown"]

_OPEN_PARAMETERS = frozenset(
    {"db", "ssl", "sentinel_ssl", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_cert_reqs", "ssl_check_hostname"}
)
"""Parameters with nothing secret in them; of those not named here, nobody knows."""


def shown(url: str) -> str:
    """The address without user, password and whatever else may be secret, however malformed it is.

    `redis://me:secret@box:6380/3` is shown as `redis://box:6380/3`.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    # The last @, and before anything else: a password that was not percent-encoded may hold any character.
    place, _, query = rest.rpartition("@")[2].partition("?")
    told = urlencode([pair for pair in parse_qsl(query) if pair[0] in _OPEN_PARAMETERS], safe="/")
    return f"{scheme}{mark}{place.partition('#')[0]}{'?' + told if told else ''}"
