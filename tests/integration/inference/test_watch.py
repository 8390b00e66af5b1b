"""Files that change while the broker runs: the registry follows, and says what is different."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from inference.registry import Changes, Registry, Sources
from inference.watch import watch
from tests.support import until
from tests.unit.inference.gguf_files import write_gguf


@asynccontextmanager
async def watched(registry: Registry) -> AsyncIterator[list[Changes]]:
    reports: list[Changes] = []
    task = asyncio.create_task(watch(registry, reports.append))
    try:
        yield reports
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


def library(root: Path) -> Registry:
    (root / "models").mkdir()
    (root / "manifests").mkdir()
    write_gguf(root / "models" / "a.gguf")
    return Registry.load(Sources((root / "models",), None, root / "manifests"))


async def test_what_comes_goes_and_changes_is_noticed(tmp_path: Path) -> None:
    registry = library(tmp_path)
    manifest = tmp_path / "manifests" / "a.yaml"
    async with watched(registry) as reports:
        manifest.write_text("context: 512\n")
        await until(lambda: registry.models["a"].context == 512, "the manifest to count")
        manifest.write_text("context: lots\n")
        await until(lambda: registry.problems, "the broken manifest to be told")
        assert registry.models["a"].context == 512, "and to keep its former version"
        manifest.write_text("context: 1024\n")
        await until(lambda: registry.models["a"].context == 1024, "the mended manifest to count")
        (tmp_path / "models" / "sub").mkdir()
        write_gguf(tmp_path / "models" / "sub" / "b.gguf")
        await until(lambda: "b" in registry.models, "the new file")
        (tmp_path / "models" / "a.gguf").unlink()
        await until(lambda: registry.models["a"].problem, "the missing file")
    assert all(reports), "nothing is reported when nothing is different"
    assert {model_id for changes in reports for model_id in changes.added} == {"b"}
    assert any(
        "context: expected a whole number" in str(problem) for changes in reports for problem in changes.problems
    )


async def test_what_changed_before_the_watch_began_is_noticed_too(tmp_path: Path) -> None:
    registry = library(tmp_path)
    write_gguf(tmp_path / "models" / "early.gguf")
    async with watched(registry) as reports:
        await until(lambda: reports, "the first report")
    assert reports[0].added == ("early",)


async def test_without_any_folder_it_waits_to_be_cancelled() -> None:
    async with watched(Registry.load(Sources())) as reports:
        await asyncio.sleep(0)
    assert reports == []


async def test_what_changes_while_the_watch_begins_is_noticed_too(tmp_path: Path) -> None:
    registry = library(tmp_path)
    look, looks = registry.reload, []

    def reload() -> Changes:
        changes = look()
        looks.append(changes)
        if len(looks) == 1:
            write_gguf(tmp_path / "models" / "between.gguf")
        return changes

    registry.reload = reload  # type: ignore[method-assign]
    async with watched(registry):
        await until(lambda: "between" in registry.models, "the file that came after the first look")
