"""Reads the questions and answers in demo/text; `examples`, `tokenizer` and `check` use what comes out.

Each line of a .jsonl file is one entry: {"ask": ["one phrasing", "another", ...], "answer": "..."}.
`{name}` and `{other}` in a text stand for the model's own name and for the other demo model's.

Three kinds of file:
1. fallback.jsonl: off-topic questions. Training adds made-up ones, all with the same answer.
2. held_out.jsonl: off-topic questions that training never sees; `check` counts how many are answered right.
3. every other file: what the models know.
"""

import dataclasses
import json
import pathlib

__all__ = ["PERSONAS", "Entry", "Persona", "Text", "load"]

FALLBACK_FILE = "fallback.jsonl"
HELD_OUT_FILE = "held_out.jsonl"


@dataclasses.dataclass(frozen=True)
class Persona:
    """Who a demo model says it is."""

    model_id: str
    """Name of its files, such as `robin`."""
    name: str
    """Name in its answers, such as `Robin`."""
    other: str
    """Name of the other demo model."""
    seed: int
    """Seed of everything random in its training."""


PERSONAS = (
    Persona(model_id="robin", name="Robin", other="Wren", seed=1),
    Persona(model_id="wren", name="Wren", other="Robin", seed=2),
)
"""The two demo models."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One answer and the questions that get it."""

    asks: tuple[str, ...]
    answer: str


@dataclasses.dataclass(frozen=True)
class Text:
    """All entries for one persona."""

    known: tuple[Entry, ...]
    fallback: tuple[Entry, ...]
    held_out: tuple[Entry, ...]

    @property
    def off_topic(self) -> tuple[str, ...]:
        """Every off-topic question that training may use."""
        return tuple(ask for entry in self.fallback for ask in entry.asks)

    @property
    def fallback_answer(self) -> str:
        """The one answer to everything off-topic."""
        return self.fallback[0].answer


def load(folder: pathlib.Path, persona: Persona) -> Text:
    """Read every .jsonl file in `folder`, filling in the names; raises ValueError naming file and line."""
    known = [path for path in sorted(folder.glob("*.jsonl")) if path.name not in (FALLBACK_FILE, HELD_OUT_FILE)]
    if not known:
        raise ValueError(f"{folder}: no .jsonl files with questions")
    return Text(
        known=tuple(entry for path in known for entry in _read(path, persona)),
        fallback=_read(folder / FALLBACK_FILE, persona),
        held_out=_read(folder / HELD_OUT_FILE, persona),
    )


def _read(path: pathlib.Path, persona: Persona) -> tuple[Entry, ...]:
    entries = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            entry = Entry(tuple(record["ask"]), record["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not an entry: {error!r}") from error
        entries.append(_with_names(entry, persona))
    return tuple(entries)


def _with_names(entry: Entry, persona: Persona) -> Entry:
    def fill(text: str) -> str:
        return text.replace("{name}", persona.name).replace("{other}", persona.other)

    return Entry(tuple(fill(ask) for ask in entry.asks), fill(entry.answer))
