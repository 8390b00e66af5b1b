"""Traces as files: JSON lines, packed by gzip where the name ends in .gz.

Called by `coordinator/cli` (simulate, trace) and `coordinator/api/trace.py`; `docs/simulate.md` describes the format.
The first line is the header: {"trace": 1, "devices": [...], "models": [...], "queue": {...}}. Each other line is one of

1. a request: {"at_s": 1.5, "model": "a", "priority": 10, "service_s": 0.7}, in any order;
2. what was learned of a model since the header: {"learned": {"id": "a", "load_s": 4.2, ...}};
3. a gap: {"lost": 12}: so many requests are missing, for the reader of a recording was too slow;
4. empty: a sign of life.

Lines are only ever added, each in one write. Whoever dies while writing leaves at most one cut line, the last, and
reading forgives it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

from inference.events import DeviceRoom, Purpose
from inference.model import STAY_WARM_S, Category
from inference.queue import QueueLimits
from inference.simulation.trace import LONGEST_S, Request, Trace, TraceModel
from inference.simulation.trace_lines import VERSION, header_line, request_line
from inference.validation import Flag, Whole, unknown, validate
from inference.yaml_files import BadInput, Problem, display

__all__ = ["Loaded", "TraceWriter", "read", "write"]

MOST_LINE_BYTES = 1 << 20
MOST_HEADER_BYTES = 64 << 20
"""A fleet's has thousands of models."""
_MOST_BYTES = 1 << 60


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError(f"must be at least 0, got {value:g}")
    return value


def _not_endless(value: float) -> float:
    if value > LONGEST_S:
        raise ValueError(f"must be at most {LONGEST_S}, got {value:g}")
    return value


_Bytes = Annotated[Whole, Field(ge=0, le=_MOST_BYTES)]
_Count = Annotated[Whole, Field(ge=1, le=10_000_000)]
_Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Seconds = Annotated[_Number, AfterValidator(_not_negative), AfterValidator(_not_endless)]
_Limit = Annotated[_Number, AfterValidator(_not_endless)]
_Id = Annotated[str, Field(min_length=1, max_length=500)]
_STRICT = ConfigDict(extra="forbid", frozen=True)


class _Device(BaseModel):
    model_config = _STRICT

    id: _Id
    total_bytes: _Bytes
    reserve_bytes: _Bytes = 0
    others_bytes: _Bytes = 0
    accelerator: Flag = True
    node: str = ""


class _Model(BaseModel):
    model_config = _STRICT

    id: _Id
    claim_bytes: Annotated[Whole, Field(gt=0, le=_MOST_BYTES)]
    load_s: _Seconds | None = None
    parallel: _Count = 1
    stay_warm_s: _Seconds = STAY_WARM_S[Category.LLM]
    min_residency_s: _Seconds | None = None
    pin: Flag = False
    preload: Flag = False
    replicas: _Count = 1
    host_bytes: _Bytes = 0


class _Header(BaseModel):
    model_config = _STRICT

    trace: Literal[1]
    devices: Annotated[list[_Device], Field(min_length=1)]
    models: list[_Model]
    queue: dict[str, _Limit | None] = Field(default_factory=dict)


class _Request(BaseModel):
    model_config = _STRICT

    at_s: _Seconds
    model: _Id
    priority: Annotated[Whole, Field(ge=0, le=1000)]
    client: str | None = None
    session: str | None = None
    purpose: Purpose = Purpose.INFER
    service_s: _Seconds | None = None
    left_s: _Seconds | None = None
    stay_warm_s: _Seconds | None = None
    cooldown_s: _Seconds | None = None


class _Learned(BaseModel):
    model_config = _STRICT

    learned: _Model


class _Lost(BaseModel):
    model_config = _STRICT

    lost: Annotated[Whole, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file's trace, and what is to be said about it."""

    trace: Trace
    warnings: tuple[str, ...] = ()


# -- writing -------------------------------------------------------------------------------------------------------


class TraceWriter:
    """A new file that lines are added to, each safe once `add` has returned.

    Raises:
        FileExistsError: there is such a file already; it is not touched.
        OSError
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._packer = zlib.compressobj(wbits=31) if path.suffix == ".gz" else None

    def add(self, line: bytes) -> None:
        """Add a line, newline included."""
        if self._packer is not None:
            line = self._packer.compress(line) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._file.write(line)

    def close(self) -> None:
        """End the file."""
        if self._packer is not None:
            self._file.write(self._packer.flush())
        self._file.close()


def write(trace: Trace, path: Path) -> None:
    """Write a whole trace to a new file. Raises as `TraceWriter` does."""
    packed = gzip.compress if path.suffix == ".gz" else bytes
    body = b"".join([header_line(trace), *map(request_line, trace.requests)])
    with path.open("xb") as file:
        file.write(packed(body))


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reading:
    """What was read so far."""

    where: str
    header: _Header | None = None
    models: dict[str, TraceModel] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lost: int = 0
    warnings: list[str] = field(default_factory=list)


def read(path: Path) -> Loaded:
    """The trace in a file, its requests in the order they came.

    Raises:
        BadInput: what is wrong, and in which line.
    """
    reading = _Reading(display(path))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line, last in _lines(file, reading):
                try:
                    _take(reading, number, line, last=last)
                except RecursionError as error:
                    raise _bad(reading.where, number, "brackets stand too deep in each other") from error
    except (OSError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _bad(reading.where, None, f"cannot be read: {reason}") from error
    return _finished(reading)


def _lines(file: BinaryIO | gzip.GzipFile, reading: _Reading) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text, and whether it is the last one and was cut. A packed file may end in the middle of a block."""
    number = 0
    while True:
        most = MOST_HEADER_BYTES if reading.header is None else MOST_LINE_BYTES
        try:
            line = file.readline(most + 1)
        except EOFError:
            reading.warnings.append(f"{reading.where}: ends in the middle; whoever wrote it was interrupted")
            return
        if not line:
            return
        number += 1
        if len(line) > most:
            raise _bad(reading.where, number, f"is longer than {most >> 20} MiB")
        yield number, line, not line.endswith(b"\n")


def _take(reading: _Reading, number: int, line: bytes, *, last: bool) -> None:
    if not line.strip():
        return
    try:
        data = json.loads(line)
    except ValueError as error:
        if last and reading.header is not None:
            reading.warnings.append(f"{reading.where}:{number}: the last line is cut and was left out")
            return
        raise _bad(reading.where, number, f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise _bad(reading.where, number, "expected keys and values in braces")
    if reading.header is None:
        _take_header(reading, number, data)
    elif "learned" in data:
        learned = validate(data, _Learned, lambda _: (reading.where, number)).learned
        reading.models[learned.id] = TraceModel(**learned.model_dump())
    elif "lost" in data:
        reading.lost += validate(data, _Lost, lambda _: (reading.where, number)).lost
    else:
        request = validate(data, _Request, lambda _: (reading.where, number))
        if request.model not in reading.models:
            raise _bad(reading.where, number, unknown("model", request.model, reading.models))
        reading.requests.append(Request(**request.__dict__))


def _take_header(reading: _Reading, number: int, data: dict[str, Any]) -> None:
    if "trace" not in data:
        raise _bad(reading.where, number, 'the first line is no header: it has no key "trace"')
    if data["trace"] != VERSION:
        raise _bad(reading.where, number, f"version {data['trace']!r} of the format; this program reads {VERSION}")
    reading.header = validate(data, _Header, lambda _: (reading.where, number))
    for kind, ones in (("devices", reading.header.devices), ("models", reading.header.models)):
        if (twice := _twice(one.id for one in ones)) is not None:
            raise _bad(reading.where, number, f"two {kind} are called {twice!r}")
    for model in reading.header.models:
        reading.models[model.id] = TraceModel(**model.model_dump())


def _finished(reading: _Reading) -> Loaded:
    header = reading.header
    if header is None:
        raise _bad(reading.where, None, "is empty: a trace begins with its header")
    if reading.lost:
        reading.warnings.append(f"{reading.where}: {reading.lost} requests are missing; the recorder was too slow")
    reading.requests.sort(key=_when)
    trace = Trace(
        devices=tuple(DeviceRoom(**device.model_dump()) for device in header.devices),
        models=tuple(reading.models.values()),
        requests=tuple(reading.requests),
        limits=_limits(reading.where, header.queue),
        source=reading.where,
    )
    return Loaded(trace, tuple(reading.warnings))


def _limits(where: str, values: Mapping[str, float | None]) -> QueueLimits:
    known = [one.name for one in fields(QueueLimits)]
    for name in values:
        if name not in known:
            raise _bad(where, 1, f"queue: {unknown('key', name, known)}")
    whole = {"max_waiting", "max_overtakes"}
    try:
        given: dict[str, Any] = {
            name: int(value) if name in whole and value is not None else value for name, value in values.items()
        }
        return QueueLimits(**given)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad(where, 1, str(error)) from error


def _twice(names: Iterable[str]) -> str | None:
    """The first name that comes a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _when(request: Request) -> float:
    return request.at_s


def _bad(where: str, line: int | None, message: str) -> BadInput:
    return BadInput((Problem(where, line, message),))
