"""Check what people wrote against a pydantic model and say what is wrong in their words: where, what, and what was
meant.

Called by `manifest.py`, `coordinator/config_files.py` and `registry.py` (backend options), after `yaml_files.py`
read the text; `explained` by `coordinator/app.py` of what came over HTTP.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Strict, ValidationError

from gpuboss.priority import parse_priority
from gpuboss.units import parse_duration, parse_memory
from inference.yaml_files import BadInput, Document, Place, Problem, display

M = TypeVar("M", bound=BaseModel)
Locate = Callable[[Place], tuple[str, int | None]]
"""From a place in the data to where it was written: file (or variable, or option) and line."""

Whole = Annotated[int, Strict()]
"""A whole number; not text, not true or false."""
Flag = Annotated[bool, Strict()]
"""true or false."""


def _seconds(value: object) -> float:
    if isinstance(value, str | int | float):
        return parse_duration(value).total_seconds()
    raise ValueError('expected seconds or a duration like "30s" or "5m"')


def _bytes(value: object) -> int:
    if isinstance(value, str | int):
        return parse_memory(value)
    raise ValueError('expected a size like "20GiB" or "512MiB"')


def _priority(value: object) -> int:
    if isinstance(value, str | int):
        return parse_priority(value)
    raise ValueError("expected a class such as low, or a whole number 0-1000")


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected characters that can be printed: it is shown in terminals")
    return value


Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
"""What people are shown."""
Seconds = Annotated[
    float,
    BeforeValidator(_seconds, json_schema_input_type=float | str),
]
"""Seconds, from a number or a text like `5m`."""
Bytes = Annotated[
    int,
    BeforeValidator(
        _bytes, json_schema_input_type=int | Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*[KMGTkmgt]?i?[Bb]?\s*$")]
    ),
]
"""Bytes, from a text like `20GiB` or a whole number."""

Priority = Annotated[int, BeforeValidator(_priority, json_schema_input_type=int | str)]
"""A class: `low`, or its number."""

_EXPECTED: Mapping[str, str] = {
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected text",
    "path_type": "expected a path",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected keys and values",
    "model_type": "expected keys and values",
    "model_attributes_type": "expected keys and values",
    "finite_number": "expected a finite number",
}


def validate(data: Mapping[str, object], model: type[M], locate: Locate, context: object = None) -> M:
    """The data as a `model`, whose validators may want a `context`.

    Raises `BadInput` with every problem, each where it was written.
    """
    try:
        return model.model_validate(data, context=context)
    except ValidationError as error:
        problems = [_problem(model, details, locate) for details in error.errors(include_url=False)]
        in_order = sorted(dict.fromkeys(problems), key=lambda problem: (problem.where, problem.line or 0))
        raise BadInput(tuple(in_order)) from error


def validate_document(document: Document, model: type[M]) -> M:
    """A whole YAML file as a `model`. Raises `BadInput`."""
    where = display(document.path)
    return validate(document.data, model, lambda place: (where, document.line_of(place)))


def explained(model: type[BaseModel], details: Any) -> str:
    """One of pydantic's errors of a `model` in the same words, for what was not written in a file."""
    return _problem(model, details, lambda _: ("", None)).message


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known names most like `name`, best first; none when nothing is near."""
    from difflib import get_close_matches  # here, for only mistakes need it

    candidates = {candidate.lower(): candidate for candidate in known}
    return [candidates[match] for match in get_close_matches(name.lower()[:200], candidates, n=count, cutoff=0.6)]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`unknown key 'prot'; nearest is 'port'`, or with everything that would be allowed when nothing is near."""
    names = sorted(known)
    match = nearest(name, names)
    return f"unknown {kind} {name!r}; " + (f"nearest is {match[0]!r}" if match else f"known: {', '.join(names)}")


# -- one error -----------------------------------------------------------------------------------------------------


def _problem(model: type[BaseModel], details: Any, locate: Locate) -> Problem:
    place, annotation = _follow(model, details["loc"])
    where, line = locate(place)
    kind, given = details["type"], details["input"]
    if kind == "extra_forbidden":
        inner = ".".join(map(str, place[:-1]))
        message = _unknown_key(str(place[-1]), annotation)
        return Problem(where, line, f"{inner}: {message}" if inner else message)
    name = ".".join(map(str, place))
    if kind == "missing":
        return Problem(where, line, f"key {name!r} is missing")
    return Problem(
        where, line, f"{name}: {_message(kind, details, given, annotation)}" if name else str(details["msg"])
    )


def _unknown_key(key: str, annotation: object) -> str:
    fields = _fields(annotation)
    for name, field in fields.items():
        if key in _fields(field):
            return f"unknown key {key!r}; it belongs under '{name}:', indented"
    return unknown("key", key, fields)


def _message(kind: str, details: Any, given: object, annotation: object) -> str:
    if kind in _EXPECTED:
        quotes = ' (put it in quotes: "...")' if kind == "string_type" and isinstance(given, int | float) else ""
        return f"{_EXPECTED[kind]}, got {_shown(given)}{quotes}"
    if kind in ("enum", "literal_error"):
        choices = _choices(annotation) or [str(details.get("ctx", {}).get("expected", ""))]
        match = nearest(str(given), choices)
        hint = f"; nearest is {match[0]!r}" if match else ""
        return f"{_shown(given)} is not one of {', '.join(choices)}{hint}"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        return f"must be {_range(annotation)}, got {_shown(given)}"
    if kind in ("value_error", "assertion_error"):
        return str(details["ctx"]["error"])
    return f"{details['msg']}, got {_shown(given)}"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _range(annotation: object) -> str:
    words = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    limits = {name: getattr(item, name) for item in _metadata(annotation) for name in words if hasattr(item, name)}
    if limits.keys() == {"ge", "le"}:
        return f"between {limits['ge']} and {limits['le']}"
    return " and ".join(words[name].format(limit) for name, limit in limits.items())


# -- from a place to the type that is wanted there -----------------------------------------------------------------


def _follow(model: type[BaseModel], steps: tuple[str | int, ...]) -> tuple[Place, object]:
    """The part of pydantic's location that is in the data, and the annotation of what is wanted there.

    For an unknown key it is the annotation of the model it stands in. pydantic adds the names of union members to its
    locations; these are not in the data and are left out.
    """
    annotation: object = model
    place: list[str | int] = []
    for step in steps:
        fields = _fields(annotation)
        inner = _inner(annotation)
        if isinstance(step, int) or (not fields and inner is not None):
            place.append(step)
            annotation = inner
        elif step in fields:
            place.append(step)
            annotation = fields[str(step)]
        elif fields:
            place.append(step)
            break
    return tuple(place), annotation


def _fields(annotation: object) -> dict[str, object]:
    """Key -> annotation (with its limits) of the pydantic model in the annotation; empty when there is none."""
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return {
                name: Annotated[field.annotation, *field.metadata, None] for name, field in part.model_fields.items()
            }
    return {}


def _inner(annotation: object) -> object:
    """What a list or mapping in the annotation holds; None when it is neither."""
    for part in _parts(annotation):
        if typing.get_origin(part) in (list, tuple, dict, Mapping):
            return [argument for argument in typing.get_args(part) if argument is not ...][-1]
        if typing.get_origin(part) is not None and typing.get_args(part):
            return typing.get_args(part)[-1]
    return None


def _parts(annotation: object) -> list[object]:
    """The alternatives of a union, without what is annotated around them."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _parts(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for argument in typing.get_args(annotation) for part in _parts(argument)]
    return [annotation]


def _metadata(annotation: object) -> list[object]:
    if typing.get_origin(annotation) is Annotated:
        inner, *items = typing.get_args(annotation)
        return [*items, *_metadata(inner)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [item for argument in typing.get_args(annotation) for item in _metadata(argument)]
    return []


def _choices(annotation: object) -> list[str]:
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            return [str(member.value) for member in part]
        if typing.get_origin(part) is typing.Literal:
            return [str(choice) for choice in typing.get_args(part)]
    return []
