"""Which models are found where: in folders, in the Hugging Face cache, in parts, and with their projectors."""

from __future__ import annotations

import os
from pathlib import Path

from inference.discovery import Found, hugging_face_cache, locate, scan


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())


def names(found: list[Found]) -> list[str]:
    return [model.path.name for model in found]


class HubCache:
    """A Hugging Face cache as its tools lay it out: blobs by hash, and links to them per revision."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, repository: str, revision: str, name: str, blob: str, *, current: bool = True) -> Path:
        folder = self.root / f"models--{repository.replace('/', '--')}"
        touch(folder / "blobs" / blob)
        link = folder / "snapshots" / revision / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder / "blobs" / blob, link.parent))
        if current:
            touch(folder / "refs" / "main")
            (folder / "refs" / "main").write_text(revision)
        return link


def test_folders_are_searched_in_depth_and_by_name(tmp_path: Path) -> None:
    touch(tmp_path / "b.gguf", tmp_path / "a" / "z.GGUF", tmp_path / "a" / "deep" / "y.gguf", tmp_path / "notes.txt")
    assert names(scan([tmp_path])) == ["b.gguf", "z.GGUF", "y.gguf"]


def test_downloads_that_are_not_finished_and_hidden_things_are_not_there(tmp_path: Path) -> None:
    touch(
        tmp_path / "a.gguf.incomplete",
        tmp_path / "b.gguf.part",
        tmp_path / ".c.gguf",
        tmp_path / ".cache" / "huggingface" / "download" / "d.gguf",
    )
    assert scan([tmp_path]) == []


def test_missing_folders_find_nothing(tmp_path: Path) -> None:
    assert scan([tmp_path / "nowhere"]) == []


def test_the_same_file_on_two_ways_is_listed_once(tmp_path: Path) -> None:
    touch(tmp_path / "one" / "a.gguf")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "link.gguf").symlink_to(tmp_path / "one" / "a.gguf")
    (tmp_path / "two" / "circle").symlink_to(tmp_path)
    assert names(scan([tmp_path / "one", tmp_path / "two", tmp_path / "one"])) == ["a.gguf"]


def test_a_link_to_nothing_is_still_found_so_that_it_shows_up(tmp_path: Path) -> None:
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "deleted")
    assert names(scan([tmp_path])) == ["gone.gguf"]


def test_a_link_in_a_circle_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "y")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    touch(tmp_path / "a.gguf")
    assert names(scan([tmp_path])) == ["a.gguf"]


def test_the_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"Big-Q4_K_M-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    touch(*parts)
    (found,) = scan([tmp_path])
    assert found.path == parts[0]
    assert found.parts == tuple(parts)
    assert found.name == "Big-Q4_K_M"
    assert not found.missing


def test_missing_parts_are_named(tmp_path: Path) -> None:
    touch(tmp_path / "big-00002-of-00003.gguf")
    (found,) = scan([tmp_path])
    assert found.missing == ("big-00001-of-00003.gguf", "big-00003-of-00003.gguf")


def test_a_projector_goes_with_the_model_whose_name_it_carries(tmp_path: Path) -> None:
    touch(
        tmp_path / "Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf",
        tmp_path / "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf",
        tmp_path / "llama-3.2-1b-q8_0.gguf",
    )
    by_name = {model.path.name: model.mmproj for model in scan([tmp_path])}
    assert by_name["Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf"] == tmp_path / "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf"
    assert by_name["llama-3.2-1b-q8_0.gguf"] is None
    assert len(by_name) == 2, "the projector itself is no model"


def test_a_projector_without_a_name_goes_with_the_only_model_of_its_folder(tmp_path: Path) -> None:
    touch(tmp_path / "gemma-3-4b-it-Q4_K_M.gguf", tmp_path / "gemma-3-4b-it-Q8_0.gguf")
    touch(tmp_path / "mmproj-BF16.gguf", tmp_path / "mmproj-F16.gguf", tmp_path / "mmproj-model-f32.gguf")
    assert {model.mmproj for model in scan([tmp_path])} == {tmp_path / "mmproj-F16.gguf"}, "f16 runs everywhere"
    touch(tmp_path / "another-Q4_K_M.gguf")
    assert {model.mmproj for model in scan([tmp_path])} == {None}, "now nobody can say whose it is"


def test_the_hugging_face_cache_is_read_through_its_links(tmp_path: Path) -> None:
    cache = HubCache(tmp_path)
    link = cache.add("org/Model-GGUF", "abc", "model-q4_0.gguf", "f00d")
    touch(tmp_path / "models--org--Model-GGUF" / "blobs" / "beef.incomplete")
    (found,) = scan([tmp_path])
    assert found.path == link, "the name with which it was fetched, not the blob's hash"


def test_of_two_revisions_the_one_that_main_means_wins(tmp_path: Path) -> None:
    cache = HubCache(tmp_path)
    new = cache.add("org/m", "aaa", "m-q4_0.gguf", "new")
    cache.add("org/m", "zzz", "m-q4_0.gguf", "old", current=False)
    only_old = cache.add("org/m", "zzz", "m-q8_0.gguf", "other", current=False)
    assert [model.path for model in scan([tmp_path])] == [new, only_old]


def test_split_files_in_the_cache_keep_their_names(tmp_path: Path) -> None:
    cache = HubCache(tmp_path)
    links = [cache.add("org/m", "abc", f"q4/m-{number:05}-of-00002.gguf", f"blob{number}") for number in (1, 2)]
    (found,) = scan([tmp_path])
    assert found.parts == tuple(links)


def test_a_path_in_a_manifest_may_name_any_part(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-{number:05}-of-00002.gguf" for number in (1, 2)]
    touch(*parts, tmp_path / "other.gguf")
    assert locate(parts[1]).parts == tuple(parts)
    assert locate(tmp_path / "other.gguf").parts == (tmp_path / "other.gguf",)
    odd = tmp_path / "model.bin"
    touch(odd)
    assert locate(odd) == Found(odd, (odd,), None, tmp_path), "an unusual ending is the owner's business"


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert hugging_face_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hugging_face_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hugging_face_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert hugging_face_cache({}) == Path.home() / ".cache" / "huggingface" / "hub"
