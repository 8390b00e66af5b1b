"""Which names models may have, and a fitting one for any file.

Called by `manifest.py` and `registry.py`. Names never become paths: the registry's table is the only way from one
to the other.
"""

from __future__ import annotations

import re

_SEGMENT = "[a-z0-9][a-z0-9._-]{0,63}"
_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,2}}(?::[A-Za-z0-9._-]{{1,64}})?")
_ALIAS = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._:/*?\[\]-]{0,191}")
_GGUF = ".gguf"


def check_id(name: str) -> str:
    """The name itself when a model may have it; ValueError with a proposal otherwise."""
    if _ID.fullmatch(name) and ".." not in name:
        return name
    proposal = "/".join(safe_id(part) for part in name.split("/")[:3])
    raise ValueError(
        "a model's id is made of lower-case letters, digits, '.', '_' and '-', starts with a letter or digit, and has "
        f"at most three parts joined by '/' and one ':tag'; {proposal!r} would do"
    )


def check_alias(name: str) -> str:
    """The alias (a name or a glob) itself; ValueError when no request could ever carry it."""
    if _ALIAS.fullmatch(name) and ".." not in name:
        return name
    raise ValueError("an alias is made of letters, digits and . _ : / - and may have the wildcards * ? [ ]")


def safe_id(name: str) -> str:
    """One id segment from any file or folder name: lower-case, quantisation kept, everything odd turned into '-'."""
    name = name[: -len(_GGUF)] if name.lower().endswith(_GGUF) else name
    name = re.sub(r"[^a-z0-9._-]+", "-", name.lower())
    name = re.sub(r"\.{2,}", ".", name).strip("-._")[:64].rstrip("-._")
    return name or "model"
