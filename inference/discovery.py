"""Find the GGUF models in folders and in the Hugging Face cache: split files and projectors go with the model they
belong to.

Called by `registry.py`. Reads folders only, never a file. Folders are taken in the order given and walked by name,
so that the same files always give the same list. Downloads that have not finished are not there yet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = re.compile(r"mmproj", re.IGNORECASE)
_PRECISION = re.compile(r"[-._]?(?:ud-)?(?:bf16|f16|f32|fp16|(?:i?q|tq)\d\w*|mxfp4\w*|nvfp4)$", re.IGNORECASE)
_PROJECTOR_ORDER = ("f16", "bf16", "q8_0", "f32")
_DEEPEST = 12


@dataclass(frozen=True, slots=True)
class Sources:
    """Where models come from; made by the settings."""

    models_dirs: tuple[Path, ...] = ()
    """Folders to search for GGUF files."""
    hugging_face_cache: Path | None = None
    """The hub cache to search as well; None: not searched. It need not exist."""
    manifests: Path | None = None
    """Folder of manifests."""
    manifests_expected: bool = False
    """True when somebody named that folder, so that its absence is worth a warning."""
    default_model: str | None = None
    """Serves requests that name no model."""


@dataclass(frozen=True, slots=True)
class Found:
    """One model as it lies on the disk."""

    path: Path
    """Its file; of a split one the first part."""
    parts: tuple[Path, ...]
    """All files that hold its weights, in order; just `path` for a whole one."""
    mmproj: Path | None
    """The vision projector next to it, when one is there that is plainly its own."""
    source: Path
    """The folder that was given, under which it was found."""
    missing: tuple[str, ...] = ()
    """Names of split parts that are not there."""

    @property
    def name(self) -> str:
        """The file's name without what only tells the parts of a split file apart."""
        split = _SPLIT.fullmatch(self.path.name)
        return split["stem"] if split else self.path.stem


def scan(folders: Sequence[Path]) -> list[Found]:
    """All models under the folders, which are searched in depth; a file reached on two ways is listed once.

    Missing and unreadable folders are passed over: the caller says so, for it knows who named them.
    """
    found: list[Found] = []
    seen: set[str] = set()
    for folder in folders:
        for files in _walk(folder, set(), 0):
            for model in _group(files, folder):
                identities = _identities(model.path)
                if seen.isdisjoint(identities):
                    found.append(model)
                seen |= identities
    return found


def locate(path: Path) -> Found:
    """The model that a manifest names by the path of its file (of any part of a split one), with what belongs to it."""
    for model in _group(_files_in(path.parent), path.parent):
        if path in model.parts:
            return model
    return Found(path, (path,), None, path.parent)


def hugging_face_cache(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face tools keep downloads: `HF_HUB_CACHE`, else `HF_HOME`/hub, else ~/.cache/huggingface/hub."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _identities(path: Path) -> set[str]:
    """What makes two findings the same: the file behind all links, or its path in a repository of whatever revision."""
    identities = {os.path.realpath(path)}
    parts = path.parts
    for index in range(len(parts) - 3):
        if parts[index].startswith("models--") and parts[index + 1] == "snapshots":
            identities.add("/".join((*parts[: index + 1], "", *parts[index + 3 :])))
    return identities


# -- walking -------------------------------------------------------------------------------------------------------


def _walk(folder: Path, entered: set[tuple[int, int]], depth: int) -> Iterator[list[Path]]:
    """The GGUF files of each folder; links to folders are followed, each folder is entered once."""
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if (status.st_dev, status.st_ino) in entered or depth > _DEEPEST:
        return
    entered.add((status.st_dev, status.st_ino))
    yield [folder / entry.name for entry in entries if _is_model_file(entry)]
    for child in _folders_to_enter(folder, entries):
        yield from _walk(child, entered, depth + 1)


def _folders_to_enter(folder: Path, entries: Sequence[os.DirEntry[str]]) -> list[Path]:
    names = [entry.name for entry in entries if not entry.name.startswith(".") and _is_dir(entry)]
    if not (folder.name.startswith("models--") and "snapshots" in names):
        return [folder / name for name in names]
    # A repository in the Hugging Face cache: its files are links in one folder per revision; the one `main` means comes
    # first, so that its files win over the same files of older revisions. The blobs themselves have no names.
    try:
        current = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        current = ""
    try:
        revisions = [
            (entry.stat().st_mtime, entry.name) for entry in os.scandir(folder / "snapshots") if _is_dir(entry)
        ]
    except OSError:
        return []
    newest_first = sorted(revisions, key=lambda revision: (revision[1] != current, -revision[0], revision[1]))
    return [folder / "snapshots" / name for _, name in newest_first]


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder / entry.name for entry in os.scandir(folder) if _is_model_file(entry))
    except OSError:
        return []


def _is_model_file(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    # A link whose target is gone still counts: it shows up with its problem instead of vanishing.
    return name.lower().endswith(".gguf") and not name.startswith(".") and not _is_dir(entry)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle
        return False


# -- one folder ----------------------------------------------------------------------------------------------------


def _group(files: Sequence[Path], source: Path) -> list[Found]:
    """The models among the files of one folder."""
    projectors = [path for path in files if _PROJECTOR.search(path.name)]
    splits: dict[tuple[str, int], dict[int, Path]] = {}
    models: list[Found] = []
    for path in files:
        split = _SPLIT.fullmatch(path.name)
        if path in projectors:
            continue
        if split:
            splits.setdefault((split["stem"], int(split["count"])), {})[int(split["number"])] = path
        else:
            models.append(Found(path, (path,), None, source))
    models += [_join(stem, count, parts, source) for (stem, count), parts in splits.items()]
    models.sort(key=lambda model: model.path)
    stems = {_bare(model.name) for model in models}
    return [_with_projector(model, projectors, alone=len(stems) == 1) for model in models]


def _join(stem: str, count: int, parts: Mapping[int, Path], source: Path) -> Found:
    numbers = range(1, min(count, 999) + 1)
    missing = tuple(f"{stem}-{number:05}-of-{count:05}.gguf" for number in numbers if number not in parts)
    present = tuple(parts[number] for number in sorted(parts))
    return Found(present[0], present, None, source, missing)


def _with_projector(model: Found, projectors: Sequence[Path], *, alone: bool) -> Found:
    """A projector belongs to the model whose name it carries; without a name, to the only model of its folder."""
    bare = _bare(model.name)
    own = [path for path in projectors if _projector_stem(path) == bare or (alone and not _projector_stem(path))]
    if not own:
        return model
    best = min(own, key=lambda path: (_precision_rank(path), path.name))
    return Found(model.path, model.parts, best, model.source, model.missing)


def _bare(name: str) -> str:
    """A model's name without its quantisation: `Qwen2.5-VL-7B-Instruct-Q4_K_M` -> `qwen2.5-vl-7b-instruct`."""
    return _PRECISION.sub("", name).strip("-._").lower()


def _projector_stem(path: Path) -> str:
    """The model's name in a projector's: `mmproj-Qwen2.5-VL-7B-f16.gguf` -> `qwen2.5-vl-7b`; often there is none."""
    stem = _PROJECTOR.sub("", _bare(path.stem)).strip("-._")
    return "" if stem == "model" else _bare(stem)


def _precision_rank(path: Path) -> int:
    match = _PRECISION.search(path.stem)
    kind = match[0].strip("-._").lower() if match else ""
    return _PROJECTOR_ORDER.index(kind) if kind in _PROJECTOR_ORDER else len(_PROJECTOR_ORDER)
