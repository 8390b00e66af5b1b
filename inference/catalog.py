"""Turn folders, manifests and file headers into models: one pass over everything, in which no bad file stops
another.

Called by `registry.py` alone, at start and on every reload. Calls `discovery` (what lies there), `manifest` (what
its owner wants), `gguf_header` (what it is) and `estimate` (what it takes). What is wrong becomes a model's
`problem` and a line in `Catalog.problems`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inference import discovery
from inference.discovery import Found, Sources
from inference.manifest import Manifest, id_of, id_of_broken, read_manifest
from inference.model import Category, Model
from inference.model_maker import Known, Made, make_model
from inference.names import safe_id
from inference.yaml_files import BadInput, Document, Problem, display, in_one_line, yaml_files


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything known about models at one moment."""

    models: Mapping[str, Model] = field(default_factory=dict)
    """By id, in the order of ids; broken ones included."""
    problems: tuple[Problem, ...] = ()
    """What keeps a model or manifest from being used."""
    warnings: tuple[Problem, ...] = ()
    """What its owner should know although everything works."""
    manifests: Mapping[Path, tuple[Manifest, Document]] = field(default_factory=dict)
    """The last version of each manifest that could be used, by file."""
    outdated: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with the present manifest of a model, where a former version stays in force; by model id."""


def build_catalog(sources: Sources, known: Known, before: Catalog) -> Catalog:
    """Look at everything anew. A manifest that is broken now and was not `before` keeps its former version."""
    return _Build(sources, known, before).run()


class _Build:
    """One pass; thrown away afterwards."""

    def __init__(self, sources: Sources, known: Known, before: Catalog) -> None:
        self._sources = sources
        self._known = known
        self._before = before
        self._models: dict[str, Model] = {}
        self._problems: list[Problem] = []
        self._warnings: list[Problem] = []
        self._manifests: dict[Path, tuple[Manifest, Document]] = {}
        self._outdated: dict[str, str] = {}
        self._found: dict[str, Found] = {}
        self._taken: set[str] = set()
        """Files that a manifest serves, links resolved."""

    def run(self) -> Catalog:
        self._find()
        for path in self._manifest_files():
            self._add_manifest(path)
        self._add_found()
        models = dict(sorted(self._models.items()))
        self._warnings += _alias_warnings(models.values())
        return Catalog(models, tuple(self._problems), tuple(self._warnings), self._manifests, self._outdated)

    # 1. what lies in the folders

    def _find(self) -> None:
        folders = [*self._sources.models_dirs]
        for folder in folders:
            if not os.access(folder, os.R_OK | os.X_OK) or not folder.is_dir():
                why = "is not a readable folder" if folder.exists() else "does not exist"
                self._warnings.append(Problem("models_dirs", None, f"{folder} {why}"))
        if self._sources.hugging_face_cache:
            folders.append(self._sources.hugging_face_cache)
        for found in discovery.scan(folders):
            self._found[_free_id(found, self._found)] = found

    # 2. what manifests say

    def _manifest_files(self) -> list[Path]:
        folder = self._sources.manifests
        if folder is None:
            return []
        try:
            return list(yaml_files(folder))
        except OSError as error:
            if self._sources.manifests_expected:
                self._warnings.append(Problem("manifests", None, f"{folder} cannot be listed: {error.strerror}"))
            return []

    def _add_manifest(self, path: Path) -> None:
        former = self._before.manifests.get(path)
        wrong: tuple[Problem, ...] = ()
        try:
            read = read_manifest(path)
        except BadInput as error:
            if former is None:
                self._problems += error.problems
                self._add_broken(path, error)
                return
            read, former, wrong = former, None, error.problems
        if read is None:
            return
        made = self._make(*read)
        if made.problems and former is not None:
            again = self._make(*former)
            if not again.problems:
                read, made, wrong = former, again, made.problems
        self._manifests[path] = read
        self._problems += [_kept(problem) for problem in wrong]
        self._add(made, read[1])
        if wrong and self._models[made.model.id] is made.model:
            self._outdated[made.model.id] = in_one_line(path, wrong)

    def _make(self, manifest: Manifest, document: Document) -> Made:
        found = None if manifest.path else self._found.get(id_of(manifest, document))
        return make_model(manifest, document, found, self._known)

    def _add(self, made: Made, document: Document) -> None:
        model = made.model
        if model.id in self._models:
            where = self._models[model.id].source
            message = f"id {model.id!r} is already used by {display(Path(where))}; this manifest is not used"
            self._problems.append(Problem(display(document.path), document.line_of(("id",)), message))
            return
        self._models[model.id] = model
        self._problems += made.problems
        self._warnings += made.warnings
        if model.problem is None:  # a slip in a manifest must not take away what its file was served as without it
            self._taken.add(os.path.realpath(model.path))

    def _add_broken(self, path: Path, error: BadInput) -> None:
        """A manifest without a former version: its model is listed with what is wrong, so that nobody has to search."""
        model_id = id_of_broken(path) or safe_id(path.stem)
        if model_id not in self._models:
            text = in_one_line(path, error.problems)
            self._models[model_id] = Model(
                model_id, Category.LLM, "llama-server", path, 0, "not known", 0, 0, source=str(path), problem=text
            )

    # 3. what no manifest speaks for

    def _add_found(self) -> None:
        for model_id, found in self._found.items():
            if os.path.realpath(found.path) in self._taken or model_id in self._models:
                continue
            made = make_model(Manifest(id=model_id), None, found, self._known)
            if made.servable:
                self._models[model_id] = made.model
                self._problems += made.problems
                self._warnings += made.warnings


def _free_id(found: Found, used: Iterable[str]) -> str:
    """An id from the file's name; with the name of what it lies in, then a number, when that is taken."""
    base = safe_id(found.name)
    owner = found.path.parent.name
    for part in found.path.parts:
        if part.startswith("models--"):
            owner = part.split("--")[1]
    qualified = f"{safe_id(owner)}/{base}"
    candidates = [base, qualified, *(f"{qualified[:120]}-{number}" for number in range(2, 10_000))]
    return next(candidate for candidate in candidates if candidate not in used)


def _alias_warnings(models: Iterable[Model]) -> list[Problem]:
    models = list(models)
    owners = {model.id: model.id for model in models}
    warnings = []
    for model in models:
        for alias in model.aliases:
            owner = owners.setdefault(alias, model.id)
            if owner != model.id:
                message = f"alias {alias!r} of {model.id} is never used: that name already leads to {owner}"
                warnings.append(Problem(display(Path(model.source)), None, message))
    return warnings


def _kept(problem: Problem) -> Problem:
    return Problem(problem.where, problem.line, f"{problem.message} (the version read before stays in force)")
