"""Every error a caller can see, and the one table that says how: HTTP status, code, type, and whether to ask again.

Errors of `inference` and `gpuboss` rise untouched to `front.py`, which has them rendered here. Those of the HTTP face:

    CallerError
    |- BadRequest             a field that is missing, unknown or of the wrong kind
    |- BadJson                the body is not JSON, or not an object
    |- KeyRefused             no API key, or a wrong one
    |- HostRefused            the Host header names a host that is not ours (DNS rebinding)
    |- CrossSiteRefused       a web page of another origin sent the request
    |- PathUnknown            no such endpoint
    |- MethodRefused          the endpoint exists, the method does not
    |- BodyTimeout            the body did not arrive in time
    |- BudgetExceeded         its engine worked on it for all the time that the request allows
    |- LeaseUnknown           no such lease, or it ended long ago
    |- LeaseElsewhere         a lease that was not asked for over HTTP
    |- LeaseDiffers           the lease of this request_id is held, and is not what is asked for now
    |- LeaseOver              the lease has ended
    |- NotLoaded              a look at an engine that does not run; looking never loads
    |- BodyTooLarge           more than the limit
    |- HeadersTooLarge        more than the limit
    '- MediaTypeRefused       a body that does not say it is JSON

`tests/unit/coordinator/test_errors.py` finds every error class of the three trees in `TABLE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from gpuboss import errors as gpuboss_errors
from gpuboss.errors import GpubossError
from inference import errors as inference_errors
from inference.errors import InferenceError

DO_NOT_REPEAT = (b"x-should-retry", b"false")
"""The header that the official clients obey: asking again would give the same answer."""
MAX_RETRY_AFTER_S = 60.0
"""The SDKs ignore longer ones."""


class CallerError(Exception):
    """Base of the errors of the HTTP face; the message is for the caller."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The field or header at fault."""


class BadRequest(CallerError):
    """A field that is missing, unknown or of the wrong kind."""


class BadJson(CallerError):
    """The body is not JSON, or not an object."""


class KeyRefused(CallerError):
    """No API key, or a wrong one."""


class HostRefused(CallerError):
    """The Host header names a host that is not ours."""


class CrossSiteRefused(CallerError):
    """A web page of another origin sent the request."""


class PathUnknown(CallerError):
    """No such endpoint."""


class MethodRefused(CallerError):
    """The endpoint exists, the method does not."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow
        """Value for the Allow header."""


class BodyTimeout(CallerError):
    """The body did not arrive in time."""


class BudgetExceeded(CallerError):
    """Its engine worked on it for all the time that the request allows (`x_budget_s`)."""


class LeaseUnknown(CallerError):
    """No such lease, or it ended more than ten minutes ago."""


class LeaseElsewhere(CallerError):
    """A lease that was not asked for over HTTP: it is not given back or renewed there."""


class LeaseDiffers(CallerError):
    """The lease of this request_id is held already, and is less than, or another's than, what is asked for now."""


class LeaseOver(CallerError):
    """The lease has ended."""


class NotLoaded(CallerError):
    """A look at an engine that does not run; looking never loads."""


class BodyTooLarge(CallerError):
    """The body is larger than the limit."""


class HeadersTooLarge(CallerError):
    """The request line and headers are larger than the limit."""


class MediaTypeRefused(CallerError):
    """A body that does not say it is JSON."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a class of errors looks in HTTP."""

    status: int
    code: str
    """Ours; stable, for programs."""
    type: str
    """OpenAI's coarser word."""
    retry_after_s: float | None = None
    """When to ask again if the error does not say; None: asking again is pointless, and the SDKs are told so."""
    tell: bool = True
    """False: the message is for the log, the caller gets `HIDDEN`."""


HIDDEN = "an internal error; the broker's log has it under this request's x-request-id"

_NO_FACTS: Mapping[str, object] = MappingProxyType({})
_ASKED = "invalid_request_error"
_AUTH = "authentication_error"
_DENIED = "permission_error"
_BUSY = "rate_limit_error"
_SERVER = "server_error"
_INTERNAL = Kind(500, "internal_error", _SERVER, tell=False)
_NO_STORE = Kind(503, "store_unavailable", _SERVER, retry_after_s=2.0)

TABLE: Mapping[type[Exception], Kind] = MappingProxyType(
    {
        CallerError: Kind(400, "invalid_request", _ASKED),
        BadRequest: Kind(400, "invalid_request", _ASKED),
        BadJson: Kind(400, "invalid_json", _ASKED),
        KeyRefused: Kind(401, "invalid_api_key", _AUTH),
        HostRefused: Kind(403, "host_not_allowed", _DENIED),
        CrossSiteRefused: Kind(403, "cross_site_refused", _DENIED),
        PathUnknown: Kind(404, "not_found", _ASKED),
        MethodRefused: Kind(405, "method_not_allowed", _ASKED),
        BodyTimeout: Kind(408, "request_timeout", _ASKED),
        BudgetExceeded: Kind(504, "budget_exceeded", _SERVER),
        LeaseUnknown: Kind(404, "lease_not_found", _ASKED),
        LeaseElsewhere: Kind(409, "lease_not_over_http", _ASKED),
        LeaseDiffers: Kind(409, "lease_differs", _ASKED),
        LeaseOver: Kind(409, "lease_over", _ASKED),
        NotLoaded: Kind(409, "model_not_loaded", _ASKED),
        BodyTooLarge: Kind(413, "request_too_large", _ASKED),
        HeadersTooLarge: Kind(431, "headers_too_large", _ASKED),
        MediaTypeRefused: Kind(415, "unsupported_media_type", _ASKED),
        InferenceError: _INTERNAL,
        inference_errors.ModelNotFound: Kind(404, "model_not_found", _ASKED),
        inference_errors.ModelBroken: Kind(503, "model_broken", _SERVER),
        inference_errors.WillNeverFit: Kind(400, "will_never_fit", _ASKED),
        inference_errors.NoRoom: Kind(503, "no_room", _SERVER, retry_after_s=10.0),
        inference_errors.QueueFull: Kind(429, "queue_full", _BUSY, retry_after_s=5.0),
        inference_errors.TooManyRecordings: Kind(429, "too_many_recordings", _BUSY, retry_after_s=60.0),
        inference_errors.TooManyQuestions: Kind(429, "too_many_questions", _BUSY, retry_after_s=5.0),
        inference_errors.QueueTimeout: Kind(503, "queue_timeout", _SERVER, retry_after_s=10.0),
        inference_errors.LoadFailed: Kind(502, "load_failed", _SERVER),
        inference_errors.LoadTimeout: Kind(504, "load_timeout", _SERVER, retry_after_s=30.0),
        inference_errors.EngineDied: Kind(502, "engine_died", _SERVER, retry_after_s=1.0),
        inference_errors.EngineStalled: Kind(504, "engine_stalled", _SERVER, retry_after_s=1.0),
        inference_errors.Preempted: Kind(503, "preempted", _SERVER, retry_after_s=5.0),
        inference_errors.Unloaded: Kind(503, "unloaded", _SERVER),
        inference_errors.ShuttingDown: Kind(503, "shutting_down", _SERVER, retry_after_s=5.0),
        inference_errors.EngineMissing: Kind(503, "engine_missing", _SERVER),
        inference_errors.IllegalTransition: _INTERNAL,
        GpubossError: _INTERNAL,
        gpuboss_errors.StateDirError: _INTERNAL,
        gpuboss_errors.LockHeld: _INTERNAL,
        gpuboss_errors.LedgerConflict: Kind(503, "ledger_conflict", _SERVER),
        gpuboss_errors.DeviceError: _INTERNAL,
        gpuboss_errors.StoreUnavailable: _NO_STORE,
        gpuboss_errors.StoreUnfit: Kind(503, "store_unfit", _SERVER),
        gpuboss_errors.NoEpoch: _NO_STORE,
        gpuboss_errors.StaleFence: _INTERNAL,
        gpuboss_errors.LeaseRefused: Kind(400, "will_never_fit", _ASKED),
        gpuboss_errors.WaitExpired: Kind(503, "no_room", _SERVER, retry_after_s=10.0),
        gpuboss_errors.ActivationRefused: Kind(503, "no_room", _SERVER, retry_after_s=10.0),
        gpuboss_errors.LedgerBusy: Kind(503, "ledger_busy", _SERVER, retry_after_s=2.0),
        gpuboss_errors.LedgerDamaged: _INTERNAL,
    }
)

_CODES_BY_ENGINE_TYPE = {
    "exceed_context_size_error": "context_length_exceeded",
    "invalid_request_error": "invalid_request",
    "not_supported_error": "not_supported",
    "not_found_error": "not_found",
    "unavailable_error": "engine_busy",
}
"""Our codes for the error types llama-server sends; its own `code` repeats the status."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """An error as it goes on the wire."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """Without content-type and length."""
    body: bytes
    """OpenAI's shape."""


def kind_of(error: BaseException) -> Kind:
    """The table's entry for an error; one that is not in it is internal."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return _INTERNAL


def render(error: BaseException) -> Rendered:
    """Status, headers and body for an error."""
    kind = kind_of(error)
    message = getattr(error, "message", HIDDEN) if kind.tell else HIDDEN
    param = getattr(error, "param", None)
    if param is None and isinstance(error, inference_errors.ModelNotFound):
        param = "model"
    headers: list[tuple[bytes, bytes]] = []
    if kind.retry_after_s is None:
        headers.append(DO_NOT_REPEAT)
    else:
        headers.append((b"retry-after", b"%d" % _retry_after_s(error, kind.retry_after_s)))
    if isinstance(error, MethodRefused):
        headers.append((b"allow", error.allow.encode()))
    if isinstance(error, BodyTimeout):
        headers.append((b"connection", b"close"))  # what may still come of the body is not waited for
    if isinstance(error, KeyRefused):
        headers.append((b"www-authenticate", b"Bearer"))
    facts = error.facts if isinstance(error, InferenceError) and kind.tell else _NO_FACTS
    return Rendered(kind.status, headers, _body(message, kind.type, kind.code, param, facts))


def sse_event(error: BaseException) -> bytes:
    """The event that ends a stream that broke; the SDKs raise its message."""
    return b"data: " + render(error).body + b"\n\n"


def from_engine(status: int, body: bytes) -> bytes:
    """An engine's own error in our shape: message and type stay, `code` becomes one of ours, `param` is there.

    A body that is not an error object is passed on as it is.
    """
    try:
        error = orjson.loads(body)["error"]
        message, kind = error["message"], str(error["type"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return body
    code = _CODES_BY_ENGINE_TYPE.get(kind, "invalid_request" if status < 500 else "engine_error")
    return _body(message, kind, code, error.get("param"))


def _retry_after_s(error: BaseException, default_s: float) -> int:
    own = getattr(error, "retry_after_s", None)
    return math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, default_s if own is None else own)))


def _body(message: object, kind: str, code: str, param: object, facts: Mapping[str, object] = _NO_FACTS) -> bytes:
    shown = {"message": message, "type": kind, "code": code, "param": param}
    return orjson.dumps({"error": {**shown, **facts, **shown}})  # first in the text, and replaced by nothing
