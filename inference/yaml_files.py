"""YAML files that people write, read together with the line of every key, so that an error can point at it.

Called by `manifest.py` and `coordinator/config_files.py`; `validation.py` then checks the values. YAML as people
expect it: `yes` and `on` are still true, but 12:30 is text and not 750, a date stays text, and a key given twice is
an error. Anchors and merge keys work; a file cannot blow up through them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

Place = tuple[str | int, ...]
"""Where a value stands in a document: keys and list positions from the outside in."""

_MOST_BYTES = 1 << 20
_MOST_NODES = 50_000
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with what people wrote."""

    where: str
    """A file's path, an environment variable, or a command line option."""
    line: int | None
    """Line in the file, from 1; None where there are no lines."""
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.line is None else f"{self.where}:{self.line}: {self.message}"


def in_one_line(path: Path, problems: Iterable[Problem]) -> str:
    """What is wrong with a file, for callers: it names the file to change, but not where on this machine it lies."""
    return "; ".join(str(replace(problem, where=path.name)) for problem in problems)


class BadInput(ValueError):
    """Configuration that cannot be used; `problems` has every one that was found, and the message all of them."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file whose outermost level is keys and values."""

    path: Path
    data: Mapping[str, object]
    lines: Mapping[Place, int]
    """Line of each key and list item."""

    def line_of(self, place: Place) -> int | None:
        """The line of the value at `place`, or of the innermost thing around it that has one."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def read_document(path: Path) -> Document:
    """The file's content; nothing but comments is an empty document. Raises `BadInput`, naming file and line."""
    text = _read_text(path)
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return Document(path, {}, {})
        builder = _Builder(path)
        data = builder.build(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.problem, error.context) if part)
        raise _bad(path, mark.line + 1 if mark else None, f"not valid YAML: {said}") from error
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise _bad(path, None, f"not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise _bad(path, None, f"nested more than {_DEEPEST} levels deep") from error
    if not isinstance(data, dict):
        raise _bad(path, root.start_mark.line + 1, f"expected keys and values, got {_kind_of(root)}")
    return Document(path, data, builder.lines)


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise _bad(path, None, "is a directory, not a YAML file")
        if not path.is_file():
            raise _bad(path, None, "is not a regular file")
        if size > _MOST_BYTES:
            raise _bad(path, None, f"is {size:,} bytes long; a configuration file has at most {_MOST_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise _bad(path, None, "does not exist") from error
    except UnicodeDecodeError as error:
        raise _bad(path, None, f"is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise _bad(path, None, f"cannot be read: {error.strerror or error}") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader without the conversions that surprise."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way to configure a loader
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Builder:
    """Plain values from YAML nodes, noting lines on the way."""

    def __init__(self, path: Path) -> None:
        self.lines: dict[Place, int] = {}
        self._path = path
        self._nodes = 0
        self._scalars = _Loader("")

    def build(self, node: yaml.Node, place: Place) -> object:
        line = node.start_mark.line + 1
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise _bad(self._path, line, f"holds more than {_MOST_NODES} values, counting what its anchors repeat")
        if len(place) > _DEEPEST:
            raise _bad(self._path, line, f"nested more than {_DEEPEST} levels deep")
        match node:
            case yaml.MappingNode():
                return self._build_mapping(node, place)
            case yaml.SequenceNode():
                return [self._build_item(item, (*place, index)) for index, item in enumerate(node.value)]
            case _:
                return self._build_scalar(node)

    def _build_item(self, node: yaml.Node, place: Place) -> object:
        self.lines.setdefault(place, node.start_mark.line + 1)
        return self.build(node, place)

    def _build_mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, object]:
        result: dict[str, object] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _bad(self._path, line, f"a key must be text, got {_kind_of(key_node)}")
            key = str(key_node.value)
            if key in result:
                first = self.lines[(*place, key)]
                raise _bad(self._path, line, f"key {key!r} is given twice (first on line {first})")
            self.lines[(*place, key)] = line
            result[key] = self.build(value_node, (*place, key))
        for other in merged:
            if not isinstance(other, yaml.MappingNode):
                raise _bad(self._path, other.start_mark.line + 1, "'<<' merges keys and values only")
            for key, value in self._build_mapping(other, place).items():
                result.setdefault(key, value)
        return result

    def _build_scalar(self, node: yaml.Node) -> object:
        if node.tag == "tag:yaml.org,2002:int" and ":" in node.value:
            return str(node.value)  # YAML 1.1 would read 12:30 as 750
        try:
            value: Any = self._scalars.construct_object(node)
        except (ValueError, OverflowError) as error:
            raise _bad(self._path, node.start_mark.line + 1, f"value {node.value!r}: {error}") from error
        return value


def _kind_of(node: yaml.Node) -> str:
    match node:
        case yaml.SequenceNode():
            return "a list"
        case yaml.MappingNode():
            return "keys and values"
        case _:
            return "a single value"


def _bad(path: Path, line: int | None, message: str) -> BadInput:
    return BadInput((Problem(display(path), line, message),))


def display(path: Path) -> str:
    """The path as people like to read it: relative when it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def yaml_files(folder: Path) -> Iterator[Path]:
    """The YAML files directly in a folder, by name, without hidden ones. Raises OSError when it cannot be listed."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith((".yaml", ".yml")) and not entry.name.startswith("."):
            yield folder / entry.name
