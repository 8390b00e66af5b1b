"""Talking to a running broker over its HTTP API. Used by every command that asks or tells it something.

Standard library only, because these commands should feel instant.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from coordinator.cli.output import ExitCode, fail, known_errors

UrlOption = Annotated[
    str | None,
    typer.Option("--url", envvar="MODEL_BOSS_URL", help="The broker's address. [default: from the configuration]"),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file. [default: model-boss.yaml here, XDG, /etc]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TIMEOUT_S = 10.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}  # noqa: S104 - compared, not bound


class LinkError(Exception):
    """Base of what goes wrong between the command line and a broker."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def end(self) -> NoReturn:
        """End the command with the message."""
        fail(self.message, self.exit_code)


class Refused(LinkError):
    """The broker answered with an error."""


class NoBroker(LinkError):
    """Nobody answers, or somebody else."""

    exit_code = ExitCode.NO_BROKER


class BadAddress(LinkError):
    """The address is none."""

    exit_code = ExitCode.USAGE


def reachable(host: str) -> str:
    """The address to call a broker by that listens on `host`, ready for a URL."""
    known = _WILDCARDS.get(host, host)
    return f"[{known}]" if ":" in known and not known.startswith("[") else known


@dataclass(frozen=True, slots=True)
class Link:
    """One broker's address and the key to it."""

    url: str
    key: str | None = None

    @classmethod
    def find(cls, url: str | None, config: Path | None) -> Link:
        """The broker that is meant: by address, else by the configuration. Raises BadInput if that is broken."""
        key = os.environ.get("MODEL_BOSS_API_KEY") or None
        if url is not None:
            return cls(url.rstrip("/"), key)
        from coordinator.config_files import load_settings

        settings = load_settings(config).settings
        return cls(f"http://{reachable(settings.host)}:{settings.port}", key)

    def get(self, path: str, **query: object) -> Any:
        """GET, as JSON. Raises LinkError."""
        asked = urllib.parse.urlencode(query, errors="surrogateescape")
        return self._ask("GET", f"{path}?{asked}" if query else path, _TIMEOUT_S)

    def post(self, path: str) -> Any:
        """POST without a body and without a time limit: loading takes as long as it takes. Raises LinkError."""
        return self._ask("POST", path, None)

    def look(self, path: str, **query: object) -> Any:
        """`get` that ends the command when something goes wrong."""
        try:
            return self.get(path, **query)
        except LinkError as error:
            error.end()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around what shows answers: where they are not as ours are, somebody else gave them, and the command ends."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            what = f"an answer has no {error}" if isinstance(error, KeyError) else str(error)
            NoBroker(f"what answers at {self.url} is not Model Boss, or another version of it ({what})").end()

    def send(self, connection: http.client.HTTPConnection, method: str, path: str) -> http.client.HTTPResponse:
        """Ask over a new connection. OSError and HTTPException as they come; BadAddress for what cannot be sent."""
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection.request(method, path, headers=headers)
        except ValueError as error:
            raise BadAddress(f"'{self.url}', or MODEL_BOSS_API_KEY, holds characters that cannot be sent") from error
        return connection.getresponse()

    def _ask(self, method: str, path: str, timeout_s: float | None) -> Any:
        connection = self.connection(timeout_s)
        try:
            response = self.send(connection, method, path)
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoBroker(
                f"no Model Boss answers at {self.url} ({reason}). Start one with `model-boss serve`, "
                "or name another with --url"
            ) from error
        finally:
            connection.close()
        return self.decode(response.status, body)

    def connection(self, timeout_s: float | None) -> http.client.HTTPConnection:
        """Not yet connected. BadAddress where the address is none."""
        try:
            parts = urllib.parse.urlsplit(self.url)
            right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0  # some ports raise
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            connection = kind(parts.netloc, timeout=timeout_s) if right else None
        except (ValueError, http.client.InvalidURL):
            connection = None
        if connection is None:
            raise BadAddress(f"'{self.url}' is no address like http://127.0.0.1:8210")
        return connection

    def decode(self, status: int, body: bytes) -> Any:
        """An answer's body. Refused for an error of a broker, NoBroker for what is none's."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status < 400 and answer is not None:
            return answer
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            raise NoBroker(f"what answers at {self.url} is not Model Boss (status {status})")
        hint = " (set MODEL_BOSS_API_KEY to the broker's key)" if error.get("code") == "invalid_api_key" else ""
        raise Refused(f"{error.get('message')}{hint}")


def connect(url: str | None, config: Path | None) -> Link:
    """`Link.find` for commands: a broken configuration ends them."""
    if url is not None:
        return Link.find(url, None)
    with known_errors():
        return Link.find(None, config)


def quoted(model: str) -> str:
    """A model's id for use in a path; ids may hold slashes, which the API takes."""
    return urllib.parse.quote(model, errors="surrogateescape")


def complete_model(incomplete: str) -> list[str]:
    """Model ids for shell completion; nothing when no broker answers."""
    from coordinator.config_files import BadInput

    try:
        link = Link.find(os.environ.get("MODEL_BOSS_URL"), None)
        ids = [str(model["id"]) for model in link.get("/api/v1/models")["models"]]
    except (BadInput, LinkError, LookupError, TypeError):
        return []
    return [known for known in ids if known.startswith(incomplete) and known.isprintable()]
