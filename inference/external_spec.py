"""What a configuration says of a program that we did not start. Cheap to import: every command reads the configuration.

Made by `coordinator/settings.py`; read by `external.py`, `external_http.py` and `external_process.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpuboss.leases import GRACE_S
from gpuboss.priority import LOW

__all__ = ["Call", "Spec", "pattern_of"]


@dataclass(frozen=True, slots=True)
class Call:
    """A request as configurations write it: `POST http://127.0.0.1:8188/free {"unload_models": true}`."""

    method: str
    url: str
    body: str = ""
    """JSON, or nothing."""

    @classmethod
    def parse(cls, text: str, *, default_method: str) -> Call:
        """METHOD URL BODY, of which only the URL must be there. ValueError says what is wrong."""
        words = text.split(maxsplit=2)
        if words and "://" in words[0]:
            words = [default_method, *text.split(maxsplit=1)]
        if len(words) < 2:
            raise ValueError(f'{text!r} is not like "{default_method} http://127.0.0.1:8188/path"')
        method, url, body = words[0].upper(), words[1], words[2] if len(words) > 2 else ""
        if method not in {"GET", "POST", "PUT", "DELETE"}:
            raise ValueError(f"{words[0]!r} is not GET, POST, PUT or DELETE")
        try:
            parts = urlsplit(url)
            sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            sound = False
        if not sound or not url.isascii() or any(c <= " " for c in url):
            raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8188/path")
        if body:
            try:
                json.loads(body)
            except ValueError:
                raise ValueError(f"{body!r} is not JSON") from None
        return cls(method, url, body)

    def __str__(self) -> str:
        return f"{self.method} {self.url}" + (f" {self.body}" if self.body else "")


@dataclass(frozen=True, slots=True)
class Spec:
    """What the configuration says of it."""

    name: str
    match: str
    """Part of its command line; between two slashes a regular expression."""
    vram_bytes: int
    """What it needs while it works."""
    priority: int = LOW
    busy: Call | None = None
    """Says whether it works; without it, it is taken to be idle."""
    free: Call | None = None
    """Makes it free its memory; without it, it is never asked to."""
    device: str | None = None
    """Where it computes; None: where it is seen to, else the device that suits best."""
    grace_s: float = GRACE_S


def pattern_of(match: str) -> re.Pattern[str]:
    """What finds the program's command line: a part of it, or a regular expression between two slashes. ValueError."""
    if not match.strip("/ "):
        raise ValueError("match must be part of the program's command line")
    if len(match) > 2 and match.startswith("/") and match.endswith("/"):
        try:
            return re.compile(match[1:-1])
        except re.error as error:
            raise ValueError(f"{match!r} is not a regular expression: {error}") from None
    return re.compile(re.escape(match))
