"""The registry: models from files and manifests, found by name; bad ones are listed and harm nobody else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpuboss.units import GIB, MIB, format_bytes
from inference import errors
from inference.estimate import Peak
from inference.model import Category, Model
from inference.profile import profile_of
from inference.registry import Registry, Room, Sources
from tests.unit.inference.gguf_files import LLAMA, write_gguf

DEMO = Path(__file__).parents[3] / "demo" / "models"


class Library:
    """A folder of models and one of manifests."""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.manifests = root / "manifests"
        self.models.mkdir()
        self.manifests.mkdir()

    def add(self, name: str, **keys: object) -> Path:
        path = self.models / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_gguf(path, {**LLAMA, **keys})

    def describe(self, name: str, text: str) -> Path:
        path = self.manifests / name
        path.write_text(text)
        return path

    def load(self, default_model: str | None = None, room: Room | None = None) -> Registry:
        return Registry.load(Sources((self.models,), None, self.manifests, True, default_model), room)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.chdir(tmp_path)
    return Library(tmp_path)


def good(registry: Registry) -> list[str]:
    return [model.id for model in registry.models.values() if model.problem is None]


# -- what there is ----------------------------------------------------------------------------------------------------


def test_a_file_needs_no_manifest(library: Library) -> None:
    path = library.add("Tiny-Chat-Q4_K_M.gguf")
    model = library.load().resolve("tiny-chat-q4_k_m")
    assert model.path == path
    assert model.category is Category.LLM
    assert model.backend == "llama-server"
    assert model.context == 4096
    assert model.file_bytes == path.stat().st_size
    assert model.claim_bytes > model.file_bytes
    assert "weights" in model.claim_basis
    assert model.source == str(library.models)
    assert model.stay_warm_s == 300


def test_a_manifest_overrides_what_the_file_says(library: Library) -> None:
    path = library.add("tiny.gguf")
    library.describe(
        "t.yaml", "id: chat\npath: ../models/tiny.gguf\nvram: 100MiB\ncontext: 512\nparallel: 2\npin: true\n"
    )
    registry = library.load()
    assert list(registry.models) == ["chat"], "the file is not listed a second time under its own name"
    assert (registry.resolve("chat").replicas, registry.resolve("chat").min_residency_s) == (1, None)
    model = registry.resolve("chat")
    assert (model.path, model.claim_bytes, model.context, model.parallel) == (path, 100 * MIB, 512, 2)
    assert model.pin
    assert model.source == str(library.manifests / "t.yaml")


def test_a_manifest_without_a_path_speaks_for_the_file_of_its_id(library: Library) -> None:
    library.add("tiny.gguf")
    library.describe("tiny.yaml", "preload: true\n")
    library.describe("b.yaml", "id: nothing-like-it\n")
    registry = library.load()
    assert registry.resolve("tiny").preload
    assert good(registry) == ["tiny"]
    assert "names no path" in str(registry.models["nothing-like-it"].problem)


def test_a_manifest_without_an_id_is_called_like_its_file(library: Library) -> None:
    library.add("tiny.gguf")
    library.describe("My Chat.yaml", "path: ../models/tiny.gguf\n")
    assert good(library.load()) == ["my-chat"]


def test_the_largest_device_decides_the_default_context(library: Library) -> None:
    library.add("m.gguf", block_count=64, context_length=100_000)
    assert library.load().models["m"].context == 32768
    fitted = library.load(room=Room(100 * MIB, "sim")).models["m"]
    assert fitted.context < 32768
    assert fitted.claim_bytes <= 100 * MIB


def test_categories_are_told_from_the_file(library: Library) -> None:
    library.add("e.gguf", pooling_type=1)
    library.add("r.gguf", pooling_type=4)
    write_gguf(library.models / "b.gguf", {**LLAMA, "attention.causal": False}, architecture="nomic-bert")
    library.add("v/v.gguf")
    write_gguf(library.models / "v" / "mmproj-f16.gguf", {}, architecture="clip", vocabulary=0, tensors={"v.x": (8, 8)})
    models = library.load().models
    assert [models[name].category.value for name in "ebrv"] == ["embedding", "embedding", "rerank", "vision"]
    assert models["v"].mmproj == library.models / "v" / "mmproj-f16.gguf"
    assert models["v"].stay_warm_s == 60


def test_files_that_are_no_models_are_left_out(library: Library) -> None:
    write_gguf(library.models / "lora.gguf", general={"general.type": "adapter"})
    write_gguf(library.models / "projector.gguf", {}, architecture="clip", vocabulary=0, tensors={"v": (8,)})
    write_gguf(library.models / "flux.gguf", architecture="flux", vocabulary=0)
    write_gguf(library.models / "vocab.gguf", tensors={})
    registry = library.load()
    assert not registry.models
    assert not registry.problems


def test_the_parts_of_a_split_model_count_together(library: Library) -> None:
    for number in range(2):
        write_gguf(
            library.models / f"big-{number + 1:05}-of-00002.gguf",
            general={"split.no": number, "split.count": 2},
            tensors={f"blk.{number}.x": (1024, 1024)},
        )
    model = library.load().resolve("big")
    assert model.path.name == "big-00001-of-00002.gguf"
    assert model.claim_bytes > model.file_bytes > 4 * MIB
    (library.models / "big-00002-of-00002.gguf").unlink()
    assert "1 of its 2 parts are missing: big-00002-of-00002.gguf" in str(library.load().models["big"].problem)


def test_files_of_the_same_name_get_different_ids_always_the_same_ones(library: Library) -> None:
    for name in ("m.gguf", "x/m.gguf", "y/x/m.gguf"):
        library.add(name)
    hub = library.models / "models--org--repo" / "snapshots" / "abc"
    hub.mkdir(parents=True)
    shutil.copy(library.models / "m.gguf", hub / "m.gguf")
    paths = {model.id: model.path for model in library.load().models.values()}
    assert paths == {
        "m": library.models / "m.gguf",
        "org/m": hub / "m.gguf",
        "x/m": library.models / "x" / "m.gguf",
        "x/m-2": library.models / "y" / "x" / "m.gguf",
    }


def test_replicas_and_least_residency_are_the_owners_to_say(library: Library) -> None:
    library.add("tiny.gguf")
    library.describe("t.yaml", "id: chat\npath: ../models/tiny.gguf\nreplicas: 3\nmin_residency_s: 2m\n")
    model = library.load().resolve("chat")
    assert (model.replicas, model.min_residency_s) == (3, 120)


def test_layers_off_the_accelerator_are_host_memory(library: Library) -> None:
    library.add("tiny.gguf")
    library.describe("t.yaml", "id: chat\npath: ../models/tiny.gguf\ngpu_layers: 2\n")
    assert library.load(room=Room(GIB, "cuda")).resolve("chat").host_bytes > 0
    assert library.load(room=Room(GIB, "cpu")).resolve("chat").host_bytes == 0


def test_what_was_learned_changes_the_claim_and_only_of_that_profile(library: Library) -> None:
    library.add("one.gguf")
    library.add("two.gguf")
    registry = library.load(room=Room(8 * GIB, "cuda"))
    one, two = registry.resolve("one"), registry.resolve("two")
    assert registry.learn({profile_of(one, "cuda"): Peak(GIB, 1), profile_of(two, "cpu"): Peak(GIB, 1)}).changed == (
        "one",
    )
    assert registry.resolve("one").claim_bytes == 1076 * MIB
    assert registry.resolve("two") == two
    assert registry.reload().changed == (), "it stays in force"


# -- what is broken ---------------------------------------------------------------------------------------------------


def test_one_of_everything_that_can_be_wrong_and_one_good_model(library: Library) -> None:
    whole = library.add("good.gguf").read_bytes()
    (library.models / "cut.gguf").write_bytes(whole[:-2000])
    (library.models / "text.gguf").write_text("not a model")
    (library.models / "gone.gguf").symlink_to(library.models / "deleted")
    library.describe("missing.yaml", "id: missing\npath: ../models/goood.gguf\n")
    library.describe("folder.yaml", "path: ../models\n")
    library.describe("typo.yaml", "path: ../models/good.gguf\n\ncontxt: 512\n")
    library.describe("yaml.yaml", "id: [\n")
    library.describe("projector.yaml", "path: ../models/good.gguf\nmmproj: ../models/good.gguf\n")
    library.describe("template.yaml", "path: ../models/good.gguf\nchat_template: nowhere.jinja\n")
    registry = library.load()
    problem = {model.id: model.problem for model in registry.models.values()}
    assert good(registry) == ["good"], "a slip in a manifest takes nothing away"
    assert problem["cut"] == (
        f"cut.gguf is truncated: its tensors need {len(whole):,} bytes, the file has {len(whole) - 2000:,} "
        f"({(len(whole) - 2000) * 100 // len(whole)} %); download it again"
    )
    assert problem["text"] == "text.gguf is not a GGUF file: it begins with 'not ', not with 'GGUF'"
    assert problem["gone"] == "gone.gguf is a link to a file that is gone"
    assert problem["missing"] == (
        "missing.yaml:2: path: '../models/goood.gguf' does not exist; nearest there is 'good.gguf'"
    )
    assert problem["folder"] is not None
    assert problem["folder"].startswith("folder.yaml:1: path: '../models' is a directory; name the .gguf file in it (")
    assert problem["typo"] == "typo.yaml:3: unknown key 'contxt'; nearest is 'context'"
    assert "yaml.yaml:2: not valid YAML" in str(problem["yaml"])
    assert "good.gguf is not a vision projector" in str(problem["projector"])
    assert problem["template"] == "template.yaml:2: chat_template: 'nowhere.jinja' does not exist"
    assert {problem.where for problem in registry.problems} >= {"models/cut.gguf", "manifests/missing.yaml"}
    with pytest.raises(errors.ModelBroken, match=r"model 'missing' cannot be served: missing.yaml:2: path: "):
        registry.resolve("missing")


def test_a_good_model_is_not_disturbed_by_bad_ones(library: Library) -> None:
    library.add("good.gguf")
    library.describe("bad.yaml", "id: bad\nparallel: none\n")
    (library.models / "bad.gguf").write_bytes(b"GGUF")
    registry = library.load()
    assert good(registry) == ["good"]
    assert registry.resolve("good").problem is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("backend: lama-server", "m.yaml:2: backend: unknown backend 'lama-server'; nearest is 'llama-server'"),
        ("options: {flash_atn: 'on'}", "m.yaml:2: options: unknown key 'flash_atn'; nearest is 'flash_attn'"),
        (
            "options:\n  threads: 1\n  batch_size: many",
            "m.yaml:4: options.batch_size: expected a whole number, got 'many'",
        ),
        ("options: {cache_type_k: q9}", "m.yaml:2: options.cache_type_k: 'q9' is not one of f32, f16, bf16, q8_0"),
        (
            "extra_args: [--host, 0.0.0.0]",
            "m.yaml:2: extra_args: --host is not yours to set: Model Boss sets it itself",
        ),
        ("extra_args: ['-c', '9']", "m.yaml:2: extra_args: -c is not yours to set: use the key 'context'"),
    ],
)
def test_what_the_backend_cannot_do_is_told(library: Library, lines: str, expected: str) -> None:
    library.add("tiny.gguf")
    library.describe("m.yaml", f"path: ../models/tiny.gguf\n{lines}\n")
    registry = library.load()
    assert str(registry.models["m"].problem).startswith(expected)
    assert [str(problem) for problem in registry.problems] == [f"manifests/{registry.models['m'].problem}"]


def test_what_the_backend_can_do_reaches_it(library: Library) -> None:
    library.add("tiny.gguf")
    keys = "options: {cache_type_k: q8_0, threads: 3, flash_attn: on}\nextra_args: [--seed, '1']\nenv: {A: b}\n"
    library.describe("m.yaml", f"path: ../models/tiny.gguf\n{keys}")
    model = library.load().resolve("m")
    assert model.options == {"cache_type_k": "q8_0", "threads": 3, "flash_attn": True}
    assert model.extra_args == ("--seed", "1")
    assert model.env == {"A": "b"}


def test_a_chat_template_is_a_path_a_name_or_a_text(library: Library) -> None:
    library.add("tiny.gguf")
    library.describe("own.jinja", "{{ x }}")
    for name, given in (("path", "own.jinja"), ("name", "chatml"), ("text", "'{{ x }}'")):
        library.describe(f"{name}.yaml", f"path: ../models/tiny.gguf\nchat_template: {given}\n")
    models = library.load().models
    assert models["path"].chat_template == str(library.manifests / "own.jinja")
    assert models["name"].chat_template == "chatml"
    assert models["text"].chat_template == "{{ x }}"


def test_an_id_given_twice_is_told_and_the_first_serves(library: Library) -> None:
    library.add("tiny.gguf")
    library.describe("a.yaml", "id: chat\npath: ../models/tiny.gguf\ncontext: 256\n")
    library.describe("b.yaml", "path: ../models/tiny.gguf\nid: chat\ncontext: 512\n")
    registry = library.load()
    assert registry.resolve("chat").context == 256
    (problem,) = registry.problems
    assert str(problem) == (
        "manifests/b.yaml:2: id 'chat' is already used by manifests/a.yaml; this manifest is not used"
    )


def test_warnings_say_where(library: Library, tmp_path: Path) -> None:
    library.add("tiny.gguf")
    library.describe("a.yaml", "id: a\npath: ../models/tiny.gguf\nvram: 1MiB\naliases: [b, x]\n")
    library.describe("b.yaml", "id: b\npath: ../models/tiny.gguf\ncontext: 8192\naliases: [x]\n")
    sources = Sources((library.models, tmp_path / "nowhere"), None, tmp_path / "none", True, "nobody")
    told = [str(warning) for warning in library.load().warnings]
    assert any(text.startswith("manifests/a.yaml:3: vram: 1MiB is less than the estimate of") for text in told)
    assert any(text.startswith("manifests/b.yaml:3: context: 8192 is more than the 4096") for text in told)
    assert "manifests/a.yaml: alias 'b' of a is never used: that name already leads to b" in told
    assert "manifests/b.yaml: alias 'x' of b is never used: that name already leads to a" in told
    told = [str(warning) for warning in Registry.load(sources).warnings]
    assert told[0] == f"models_dirs: {tmp_path / 'nowhere'} does not exist"
    assert told[1].startswith(f"manifests: {tmp_path / 'none'} cannot be listed")
    assert told[2].startswith("default_model: no model named 'nobody'")


def test_only_files_with_the_right_ending_are_manifests(library: Library) -> None:
    for name in ("a.yaml.bak", ".b.yaml", "c.txt"):
        library.describe(name, "nonsense: [")
    library.describe("comments.yaml", "# nothing yet\n")
    registry = library.load()
    assert not registry.models
    assert not registry.problems


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def named(library: Library) -> Registry:
    library.add("tiny.gguf")
    for name, aliases in (("a", "gpt-4o, small"), ("b", "'gpt-*', '*-turbo'"), ("c", "'gpt-3*', '*'")):
        library.describe(f"{name}.yaml", f"id: {name}\npath: ../models/tiny.gguf\naliases: [{aliases}]\n")
    return library.load(default_model="small")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", "a"),
        ("A", "c"),
        ("small", "a"),
        ("gpt-4o", "a"),
        ("gpt-4o-mini", "b"),
        ("gpt-3.5", "c"),
        ("gpt-3.5-turbo", "b"),
        ("other-turbo", "b"),
        ("anything/else", "c"),
        (None, "a"),
        ("", "a"),
    ],
)
def test_a_name_leads_to_its_model(named: Registry, name: str | None, expected: str) -> None:
    assert named.resolve(name).id == expected


def test_upper_case_is_forgiven_where_nothing_else_fits(library: Library) -> None:
    library.add("Tiny-Q8_0.gguf")
    assert library.load().resolve("Tiny-Q8_0").id == "tiny-q8_0"


def test_an_unknown_name_is_told_what_is_near(library: Library) -> None:
    library.add("robin.gguf")
    library.add("wren.gguf")
    registry = library.load()
    with pytest.raises(errors.ModelNotFound) as caught:
        registry.resolve("robbin")
    assert str(caught.value) == "no model named 'robbin'; nearest: robin; /v1/models lists all 2"


def test_names_from_callers_are_only_looked_up(library: Library) -> None:
    library.add("robin.gguf")
    registry = library.load()
    for name in (
        "../robin",
        str(library.models / "robin.gguf"),
        "robin\0",
        "x" * 1_000_000,
        "\u202enibor",
        "[",
        "robin/..",
    ):
        with pytest.raises(errors.ModelNotFound) as caught:
            registry.resolve(name)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()


def test_no_name_and_no_default(library: Library) -> None:
    library.add("robin.gguf")
    with pytest.raises(errors.ModelNotFound, match="default_model"):
        library.load().resolve(None)


def test_no_models_at_all(library: Library) -> None:
    with pytest.raises(errors.ModelNotFound, match="there are no models at all; put GGUF files into a folder listed"):
        library.load().resolve("robin")


# -- reload -----------------------------------------------------------------------------------------------------------


def test_a_reload_says_what_changed(library: Library) -> None:
    library.add("a.gguf")
    library.add("b.gguf")
    registry = library.load()
    assert not registry.reload()
    library.add("c.gguf")
    (library.models / "a.gguf").unlink()
    library.describe("b.yaml", "path: ../models/b.gguf\ncontext: 1024\n")
    changes = registry.reload()
    assert (changes.added, changes.removed, changes.changed) == (("c",), ("a",), ("b",))
    assert registry.resolve("b").context == 1024


def test_a_manifest_that_breaks_keeps_its_former_version_and_says_so(library: Library) -> None:
    library.add("a.gguf")
    manifest = library.describe("m.yaml", "id: chat\npath: ../models/a.gguf\ncontext: 512\n")
    registry = library.load()
    before = registry.models
    manifest.write_text("id: chat\npath: ../models/a.gguf\ncontext: lots\n")
    changes = registry.reload()
    assert (changes.added, changes.removed, changes.changed) == ((), (), ())
    assert [str(problem) for problem in changes.problems] == [
        "manifests/m.yaml:3: context: expected a whole number, got 'lots' (the version read before stays in force)"
    ]
    assert registry.models == before
    assert registry.outdated == {"chat": "m.yaml:3: context: expected a whole number, got 'lots'"}
    assert not registry.reload(), "said once, and kept for every further reload"
    assert registry.problems == changes.problems
    manifest.write_text("id: chat\npath: ../models/nowhere.gguf\n")
    assert "nowhere.gguf" in str(registry.reload().problems[0])
    assert "nowhere.gguf" in registry.outdated["chat"]
    assert registry.resolve("chat").context == 512
    manifest.write_text("id: chat\npath: ../models/a.gguf\ncontext: 512\n")
    changes = registry.reload()
    assert (changes.changed, changes.problems) == ((), ())
    assert changes.mended == ("manifests/m.yaml",), "also where nothing came of it"
    manifest.write_text("id: chat\npath: ../models/a.gguf\ncontext: 256\n")
    changes = registry.reload()
    assert (changes.changed, changes.mended) == (("chat",), ())
    assert not registry.problems
    assert not registry.outdated


def test_what_only_deserves_a_warning_is_told_on_a_reload_too(library: Library) -> None:
    library.add("a.gguf")
    library.add("b.gguf")
    registry = library.load()
    manifest = library.describe("m.yaml", "id: chat\npath: ../models/a.gguf\naliases: [b]\n")
    changes = registry.reload()
    assert [str(problem) for problem in changes.problems] == [
        "manifests/m.yaml: alias 'b' of chat is never used: that name already leads to b"
    ]
    manifest.write_text("id: chat\npath: ../models/a.gguf\naliases: [c]\n")
    changes = registry.reload()
    assert (changes.problems, changes.mended) == ((), ("manifests/m.yaml",))


def test_a_model_whose_file_goes_is_broken_and_comes_back_with_it(library: Library) -> None:
    path = library.add("a.gguf")
    library.describe("m.yaml", "id: chat\npath: ../models/a.gguf\n")
    registry = library.load()
    path.rename(library.models / "elsewhere")
    changes = registry.reload()
    assert changes.changed == ("chat",)
    assert "does not exist" in str(registry.models["chat"].problem)
    (library.models / "elsewhere").rename(path)
    registry.reload()
    assert registry.resolve("chat").path == path


def test_what_cannot_run_yet_is_listed_with_what_it_would_take(library: Library) -> None:
    whole = library.add("robin-7b-q4_k_m.gguf")
    (library.models / "cut-7b-q4_k_m.gguf").write_bytes(whole.read_bytes()[:-100])
    (library.models / "gone-7b-q4_k_m.gguf").symlink_to(library.models / "nowhere")
    weights = DEMO / "robin-hf" / "model.safetensors"
    library.describe("hf.yaml", f"path: {weights}\n")
    basis = {model.id: model.claim_basis for model in library.load().models.values() if model.problem}
    assert basis["cut-7b-q4_k_m"] == f"file {format_bytes(whole.stat().st_size - 100)} x 1.1"
    assert basis["gone-7b-q4_k_m"] == "7b in its name: 7e9 parameters of 5 bits x 1.2"
    assert basis["hf"] == "tensors of its files 1.9MiB x 1.2"


def test_a_download_is_broken_until_it_is_complete(library: Library) -> None:
    whole = library.add("a.gguf").read_bytes()
    growing = library.models / "b.gguf"
    growing.write_bytes(whole[: len(whole) // 2])
    registry = library.load()
    assert good(registry) == ["a"]
    growing.write_bytes(whole)
    os.utime(growing, (1, 1))
    assert registry.reload().changed == ("b",)
    assert good(registry) == ["a", "b"]


def test_models_seen_by_a_reader_do_not_change_under_it(library: Library) -> None:
    library.add("a.gguf")
    registry = library.load()
    seen = registry.models
    library.add("b.gguf")
    registry.reload()
    assert list(seen) == ["a"]
    assert list(registry.models) == ["a", "b"]


def test_it_says_which_folders_to_watch(library: Library, tmp_path: Path) -> None:
    assert library.load().watched() == (library.models, library.manifests)
    assert Registry.load(Sources((tmp_path / "nowhere",), None, None)).watched() == ()


def test_a_claim_beyond_every_device_is_still_a_model(library: Library) -> None:
    library.add("a.gguf")
    library.describe("m.yaml", "id: huge\npath: ../models/a.gguf\nvram: 900GiB\n")
    model: Model = library.load(room=Room(8 * GIB, "sim")).resolve("huge")
    assert model.claim_bytes == 900 * GIB, "the scheduler refuses it with numbers, for it alone knows the devices"
