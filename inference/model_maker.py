"""Make one model from what its manifest says and what its file is, or say why that is not possible.

Called by `catalog.py`, once per manifest and once per file that no manifest speaks for. Never raises for what
people wrote or downloaded: the model then carries a `problem`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import create_model

from inference import backends, discovery
from inference.discovery import Found
from inference.estimate import Claim, Peak, Room, Wish, claim
from inference.gguf_header import BadGguf, GgufHeader, HeaderCache
from inference.gguf_kinds import category_of, not_servable
from inference.manifest import Manifest, id_of
from inference.model import STAY_WARM_S, Category, Model
from inference.profile import profile_of
from inference.validation import unknown, validate
from inference.weights import weigh
from inference.yaml_files import BadInput, Document, Problem, display, in_one_line


@dataclass(frozen=True, slots=True)
class Made:
    """One model and what there is to say about it."""

    model: Model
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    servable: bool = True
    """False for a file that is whole but no model for requests: an adapter, a projector, a bare vocabulary."""


class _Unusable(Exception):
    """This model cannot be; says under which key of the manifest the reason stands."""

    def __init__(self, key: str, message: str, *, servable: bool = True) -> None:
        super().__init__(message)
        self.key = key
        self.message = message
        self.servable = servable


@dataclass(frozen=True, slots=True)
class Known:
    """What the making of any model rests on, besides what its manifest and its file say."""

    headers: HeaderCache
    room: Room | None
    """The device with the most memory, where it is known."""
    peaks: Mapping[str, Peak]
    """What loads were seen to take, by `profile_of`."""


def make_model(manifest: Manifest, document: Document | None, found: Found | None, known: Known) -> Made:
    """The model of a manifest (with its document), or of a file found without one (`found` then says which).

    With a manifest that names no path, `found` is the file that was found under its id.
    """
    return _Maker(manifest, document, found, known).make()


class _Maker:
    def __init__(self, manifest: Manifest, document: Document | None, found: Found | None, known: Known) -> None:
        self._manifest = manifest
        self._document = document
        self._found = found
        self._headers = known.headers
        self._room = known.room
        self._peaks = known.peaks
        self._id = id_of(manifest, document) if document else manifest.id or "model"

    def make(self) -> Made:
        try:
            return self._make()
        except _Unusable as error:
            if self._document is None:
                return Made(self._broken(error.message), (self._problem("", error.message),), servable=error.servable)
            return self._refused((self._problem(error.key, error.message),), self._document)
        except BadInput as error:
            assert self._document is not None, "only a manifest has options"
            return self._refused(error.problems, self._document)

    def _refused(self, problems: tuple[Problem, ...], document: Document) -> Made:
        return Made(self._broken(in_one_line(document.path, problems)), problems)

    def _make(self) -> Made:
        manifest = self._manifest
        found = self._locate()
        headers = self._read_parts(found)
        mmproj, mmproj_bytes = self._projector(found)
        category = manifest.category or category_of(headers[0], has_projector=mmproj is not None)
        self._check_backend(category)
        stay_warm_s = STAY_WARM_S[category] if manifest.stay_warm_s is None else manifest.stay_warm_s
        unclaimed = Model(
            id=self._id,
            category=category,
            backend=manifest.backend,
            path=found.path,
            claim_bytes=0,
            claim_basis="",
            file_bytes=sum(header.file_bytes for header in headers),
            context=0,
            parallel=manifest.parallel,
            replicas=manifest.replicas,
            stay_warm_s=stay_warm_s,
            min_residency_s=manifest.min_residency_s,
            pin=manifest.pin,
            preload=manifest.preload,
            aliases=manifest.aliases,
            mmproj=mmproj,
            gpu_layers=manifest.gpu_layers,
            chat_template=self._chat_template(),
            options=manifest.options,
            extra_args=manifest.extra_args,
            env=manifest.env,
            source=self._source(found),
        )
        claimed = claim(headers, mmproj_bytes, self._wish(category), self._room, self._seen(unclaimed))
        model = replace(
            unclaimed,
            claim_bytes=claimed.bytes,
            claim_basis=claimed.basis,
            context=claimed.context,
            host_bytes=claimed.host_bytes,
        )
        return Made(model, warnings=self._warnings(claimed))

    def _seen(self, model: Model) -> Callable[[int], Peak | None]:
        """What loads of it with a context were seen to take where it would run."""
        kind = self._room.kind if self._room else ""
        return lambda context: self._peaks.get(profile_of(replace(model, context=context), kind))

    # -- the files ---------------------------------------------------------------------------------------------

    def _locate(self) -> Found:
        if self._manifest.path is None:
            if self._found is None:
                raise _Unusable(
                    "id",
                    f"the manifest names no path, and no GGUF file that would be called {self._id!r} was found in "
                    "models_dirs or in the Hugging Face cache",
                )
            return self._found
        path = self._beside(self._manifest.path)
        try:
            is_folder = path.is_dir()
            exists = path.exists()
        except OSError as error:
            raise _Unusable("path", f"{self._manifest.path!r}: {error.strerror}") from error
        if is_folder:
            raise _Unusable("path", f"{self._manifest.path!r} is a directory; name the .gguf file in it{_inside(path)}")
        if not exists:
            raise _Unusable("path", f"{self._manifest.path!r} does not exist{_nearby(path)}")
        return discovery.locate(path)

    def _read_parts(self, found: Found) -> tuple[GgufHeader, ...]:
        if found.missing:
            names = ", ".join(found.missing[:3]) + (", ..." if len(found.missing) > 3 else "")
            total = len(found.parts) + len(found.missing)
            raise _Unusable("path", f"{len(found.missing)} of its {total} parts are missing: {names}")
        headers = tuple(self._read(part, "path") for part in found.parts)
        first = headers[0]
        if why := not_servable(first):
            raise _Unusable("path", f"{found.path.name} {why}", servable=False)
        if first.split[1] != len(headers):
            raise _Unusable(
                "path",
                f"{found.path.name} is one of {first.split[1]} parts; keep their names ending in -00001-of-0000N.gguf",
            )
        return headers

    def _read(self, path: Path, key: str) -> GgufHeader:
        try:
            return self._headers.read(path)
        except BadGguf as error:
            raise _Unusable(key, f"{path.name} {error}") from error
        except FileNotFoundError as error:
            what = "is a link to a file that is gone" if path.is_symlink() else "does not exist"
            raise _Unusable(key, f"{path.name} {what}") from error
        except OSError as error:
            raise _Unusable(key, f"{path.name} cannot be read: {error.strerror}") from error

    def _projector(self, found: Found) -> tuple[Path | None, int]:
        given = self._manifest.mmproj
        path = self._beside(given) if given else found.mmproj
        if path is None:
            return None, 0
        if given and not path.exists():
            raise _Unusable("mmproj", f"{given!r} does not exist{_nearby(path)}")
        header = self._read(path, "mmproj")
        if header.architecture != "clip":
            raise _Unusable("mmproj", f"{path.name} is not a vision projector (architecture {header.architecture!r})")
        return path, header.file_bytes

    # -- the rest of the manifest ------------------------------------------------------------------------------

    def _check_backend(self, category: Category) -> None:
        manifest = self._manifest
        backend = backends.REGISTRY.get(manifest.backend)
        if backend is None:
            raise _Unusable("backend", unknown("backend", manifest.backend, backends.REGISTRY))
        if category not in backend.categories:
            served = ", ".join(sorted(backend.categories))
            raise _Unusable("category", f"{manifest.backend} serves {served}, not {category}")
        if document := self._document:
            where = display(document.path)
            validate(
                {"options": manifest.options},
                create_model("_", options=backend.options),
                lambda place: (where, document.line_of(place)),
            )
        try:
            backend.check_args(manifest.extra_args)
        except ValueError as error:
            raise _Unusable("extra_args", str(error).removeprefix("extra_args: ")) from error

    def _wish(self, category: Category) -> Wish:
        """Options that change what a model takes; they were checked before, so what is missing is at its default."""
        manifest, options = self._manifest, self._manifest.options
        whole_input = category in (Category.EMBEDDING, Category.RERANK)
        return Wish(
            vram_bytes=manifest.vram_bytes,
            context=manifest.context,
            parallel=manifest.parallel,
            gpu_layers=manifest.gpu_layers,
            cache_type_k=options.get("cache_type_k", "f16"),
            cache_type_v=options.get("cache_type_v", "f16"),
            batch=options.get("ubatch_size") or (options.get("batch_size") if whole_input else None),
            whole_input=whole_input,
            flash_attention=options.get("flash_attn") not in ("off", False),
        )

    def _chat_template(self) -> str | None:
        given = self._manifest.chat_template
        if given is None or "{" in given:
            return given
        path = self._beside(given)
        try:
            if path.is_file():
                return str(path)
        except OSError:
            pass  # too long for a path: then it is no path
        if "/" in given or given.endswith((".jinja", ".j2", ".txt")):
            raise _Unusable("chat_template", f"{given!r} does not exist{_nearby(path)}")
        return given  # the name of one that the engine brings along

    def _beside(self, given: str) -> Path:
        """A path from the manifest: `~` is the home folder, anything relative starts at the manifest."""
        folder = self._document.path.parent if self._document else Path()
        path = (folder / Path(given).expanduser()).absolute()
        plain = Path(os.path.normpath(path))
        # `a/../b` reads better as `b`, but not where `a` is a link: there `..` leads elsewhere.
        return plain if os.path.realpath(plain) == os.path.realpath(path) else path

    # -- words -------------------------------------------------------------------------------------------------

    def _source(self, found: Found | None) -> str:
        if self._document:
            return str(self._document.path)
        return str(found.source) if found else ""

    def _problem(self, key: str, message: str) -> Problem:
        if self._document is None:
            path = self._found.path if self._found else Path(self._id)
            return Problem(display(path), None, message.removeprefix(f"{path.name} "))
        return Problem(display(self._document.path), self._document.line_of((key,)), f"{key}: {message}")

    def _warnings(self, claimed: Claim) -> tuple[Problem, ...]:
        return tuple(
            self._problem("context" if text.startswith("context") else "vram", text.split(" ", 1)[1])
            for text in claimed.warnings
        )

    def _broken(self, problem: str) -> Model:
        manifest = self._manifest
        path = self._beside(manifest.path) if manifest.path else Path()
        if self._found:
            path = self._found.path
        files = self._found.parts if self._found else _files_at(path)
        weight = weigh(files, path.name or self._id)
        return Model(
            id=self._id,
            category=manifest.category or Category.LLM,
            backend=manifest.backend,
            path=path,
            claim_bytes=weight.bytes if weight else 0,
            claim_basis=weight.basis if weight else "not known",
            file_bytes=_size_of(path),
            context=manifest.context or 0,
            parallel=manifest.parallel,
            pin=manifest.pin,
            preload=manifest.preload,
            aliases=manifest.aliases,
            source=self._source(self._found),
            problem=problem,
        )


def _nearby(path: Path) -> str:
    """`; nearest there is 'x.gguf'`, when the folder has something like it."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"; its folder {path.parent.name!r} does not exist either"
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; nearest there is {match[0]!r}" if match else ""


def _inside(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    except OSError:
        return ""
    return f" ({', '.join(names[:3])})" if names else ""


def _files_at(path: Path) -> list[Path]:
    """The file itself; of a folder the model files in it."""
    try:
        inside = sorted(entry for entry in path.iterdir() if entry.suffix in (".gguf", ".safetensors"))
    except OSError:
        return [path]
    return [entry for entry in inside if entry.suffix == inside[0].suffix]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
