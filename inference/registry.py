"""The models there are, by name: the one table between what callers say and what lies on the disk.

Made by `coordinator/app.py`; read by the pool and by every route. `catalog.py` builds what it holds. A reload
builds anew and then exchanges everything at once, so that a reader sees the old models or the new ones, never a
mixture.
"""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from inference import errors
from inference.catalog import Catalog, build_catalog
from inference.discovery import Sources
from inference.estimate import Peak, Room
from inference.gguf_header import HeaderCache
from inference.model import Model
from inference.model_maker import Known
from inference.validation import nearest
from inference.yaml_files import Problem

__all__ = ["Changes", "Problem", "Registry", "Room", "Sources"]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reload changed, by model id."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    """Models of which something is different; it applies to their next load."""
    problems: tuple[Problem, ...]
    """Problems and warnings that were not there before."""
    mended: tuple[str, ...]
    """Files, and settings, with which nothing is wrong any more."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.problems or self.mended)


class Registry:
    """All models, good and broken. Use `Registry.load`."""

    def __init__(self, sources: Sources, room: Room | None) -> None:
        self._sources = sources
        self._room = room
        self._headers = HeaderCache()
        self._peaks: Mapping[str, Peak] = {}
        self._building = threading.Lock()
        self._catalog = Catalog()
        self._names = _Names({})

    @classmethod
    def load(cls, sources: Sources, room: Room | None = None) -> Registry:
        """Look at all sources. Reads the headers of all model files; raises nothing for what is wrong with any of them.

        `room` is the device with the most memory, where it is known: contexts are chosen to fit alone on it.
        """
        registry = cls(sources, room)
        registry.reload()
        return registry

    @property
    def models(self) -> Mapping[str, Model]:
        """All models by id, sorted; those with a `problem` are known but cannot be served."""
        return MappingProxyType(self._catalog.models)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that keeps a model or a manifest from being used, with file and line."""
        return self._catalog.problems

    @property
    def outdated(self) -> Mapping[str, str]:
        """What is wrong with a model's present manifest, by id; a former version of it is in force."""
        return MappingProxyType(self._catalog.outdated)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What the owner should know although it works: a `vram` that looks too small, a folder that is not there."""
        return self._catalog.warnings + self._names.default_problem(self._sources.default_model)

    def resolve(self, name: str | None) -> Model:
        """The model a request means: by id, by alias, by an alias with wildcards; without a name the `default_model`.

        Raises ModelNotFound, naming what is near, or ModelBroken with the model's problem.
        """
        if name is None or name == "":
            name = self._sources.default_model
            if name is None:
                raise errors.ModelNotFound(
                    "the request names no model, and no default_model is set in the configuration"
                )
        model = self._names.find(name)
        if model is None:
            raise errors.ModelNotFound(self._names.not_found(name))
        if model.problem is not None:
            raise errors.ModelBroken(f"model {model.id!r} cannot be served: {model.problem}")
        return model

    def learn(self, peaks: Mapping[str, Peak]) -> Changes:
        """Rest the claims on what loads were seen to take (by `profile_of`), and `reload`; it applies to next loads."""
        self._peaks = peaks
        return self.reload()

    def reload(self) -> Changes:
        """Look at all sources anew and say what changed; a manifest that is broken now keeps its former version.

        Reads files, so call it in a thread where a pause would hurt; two calls at once follow one another.
        """
        with self._building:
            before, told = self._catalog, self.problems + self.warnings
            self._catalog = build_catalog(self._sources, Known(self._headers, self._room, self._peaks), before)
            self._names = _Names(self._catalog.models)
            return _compare(before.models, self._catalog.models, told, self.problems + self.warnings)

    def watched(self) -> tuple[Path, ...]:
        """The folders whose changes call for a reload, as far as they exist."""
        folders = [*self._sources.models_dirs, self._sources.manifests, self._sources.hugging_face_cache]
        return tuple(folder for folder in folders if folder is not None and folder.is_dir())


class _Names:
    """Who is meant by a name."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._aliases: dict[str, Model] = {}
        self._globs: list[tuple[str, Model]] = []
        for model in models.values():
            for alias in model.aliases:
                if any(character in alias for character in "*?["):
                    self._globs.append((alias, model))
                else:
                    self._aliases.setdefault(alias, model)
        # The most particular pattern first; a pattern of a model that works before the same one of a broken one.
        self._globs.sort(key=lambda item: (-_literal_length(item[0]), item[1].problem is not None, item[1].id))

    def find(self, name: str) -> Model | None:
        exact = self._models.get(name) or self._aliases.get(name)
        if exact is not None or len(name) > _LONGEST_NAME:
            return exact
        for pattern, model in self._globs:
            if fnmatch.fnmatchcase(name, pattern):
                return model
        return self._models.get(name.lower())

    def not_found(self, name: str) -> str:
        known = [*self._models, *self._aliases]
        if not known:
            return (
                f"no model named {_shown(name)}: there are no models at all; put GGUF files into a folder listed under "
                "models_dirs, or write a manifest"
            )
        matches = nearest(name, known, 3)
        near = f"; nearest: {', '.join(matches)}" if matches else ""
        return f"no model named {_shown(name)}{near}; /v1/models lists all {len(self._models)}"

    def default_problem(self, name: str | None) -> tuple[Problem, ...]:
        if name is None or self.find(name) is not None:
            return ()
        return (Problem("default_model", None, self.not_found(name)),)


_LONGEST_NAME = 200


def _literal_length(pattern: str) -> int:
    """Characters of a glob that are not wildcards."""
    return len(re.sub(r"[*?]|\[[^\]]*\]", "", pattern))


def _shown(name: str) -> str:
    """The name as a caller gave it, shortened, with control characters made visible."""
    return repr(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...")


def _compare(
    old: Mapping[str, Model], new: Mapping[str, Model], told: tuple[Problem, ...], wrong: tuple[Problem, ...]
) -> Changes:
    still = {problem.where for problem in wrong}
    return Changes(
        added=tuple(model_id for model_id in new if model_id not in old),
        removed=tuple(model_id for model_id in old if model_id not in new),
        changed=tuple(model_id for model_id in new if model_id in old and new[model_id] != old[model_id]),
        problems=tuple(problem for problem in wrong if problem not in told),
        mended=tuple(dict.fromkeys(problem.where for problem in told if problem.where not in still)),
    )
