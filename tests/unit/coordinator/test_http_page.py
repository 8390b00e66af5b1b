"""docs/http.md tells every error and every field of our own as the program has them."""

from __future__ import annotations

import re

from coordinator import errors, extensions
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_error_is_on_the_page_with_its_status_and_whether_to_ask_again() -> None:
    told = {
        code: (int(status), again == "yes")
        for status, code, again in re.findall(r"^\| (\d{3}) \| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE)
    }
    engine_says = {"context_length_exceeded"}
    has = {kind.code: (kind.status, kind.retry_after_s is not None) for kind in errors.TABLE.values()}
    assert {code: told[code] for code in told.keys() - engine_says} == has


def test_every_field_is_on_the_page_with_its_header() -> None:
    told = dict(re.findall(r"^\| `(x_\w+)` \| `([\w-]+)` \|", PAGE, re.MULTILINE))
    assert {name: header.lower() for name, header in told.items()} == {
        f"x_{name}": f"x-boss-{name.replace('_', '-')}" for name in extensions.FIELDS
    }


def test_the_bounds_on_the_page_are_those_that_are_checked() -> None:
    rows = {row.split("`")[1]: row for row in PAGE.splitlines() if row.startswith("| `x_")}
    for name, field in extensions.FIELDS.items():
        most = field.schema.get("maximum") or field.schema.get("maxLength")
        assert most is None or f"to {most:.0f}" in rows[f"x_{name}"], name
