"""The lines of a trace's file, as bytes with their newline.

Called by `trace_file.py` and `recorder.py`; what they mean is told in `trace_file.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from inference.events import DeviceRoom
from inference.simulation.trace import Request, Trace, TraceModel

__all__ = ["VERSION", "header_line", "learned_line", "lost_line", "request_line"]

VERSION = 1


def header_line(trace: Trace) -> bytes:
    """The first line of the trace's file."""
    devices = [_device(device) for device in trace.devices]
    models = [_model(model) for model in trace.models]
    return _line({"trace": VERSION, "devices": devices, "models": models, "queue": asdict(trace.limits)})


def request_line(request: Request) -> bytes:
    """The line of a request; what is as usual is left out."""
    values: dict[str, object] = {}
    for name, usual in _REQUEST_DEFAULTS.items():
        value = getattr(request, name)
        if value != usual:
            values[name] = round(value, 6) if isinstance(value, float) else value
    return _line(values)


def learned_line(model: TraceModel) -> bytes:
    """The line that says what is known of a model now."""
    return _line({"learned": _model(model)})


def lost_line(count: int) -> bytes:
    """The line that says that requests are missing."""
    return _line({"lost": count})


_REQUEST_DEFAULTS: dict[str, object] = {one.name: one.default for one in fields(Request)}


def _device(device: DeviceRoom) -> dict[str, object]:
    """Whose the others' memory is does not matter: they keep it."""
    values = asdict(device)
    del values["leased_bytes"]
    usual = {"reserve_bytes": 0, "others_bytes": 0, "accelerator": True, "node": ""}
    return _spare(values, usual)


def _model(model: TraceModel) -> dict[str, object]:
    return _spare(asdict(model), {one.name: one.default for one in fields(TraceModel)})


def _spare(values: dict[str, Any], usual: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if key not in usual or value != usual[key]}


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
