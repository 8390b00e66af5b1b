"""`model-boss config show|path|schema|check`, and `model-boss init`.

Registered by `cli/__init__.py`. Needs no broker: it reads the same files that `serve` reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.output import EXIT_CODES, ExitCode, count, fail, print_json, print_table
from coordinator.config_files import CONFIG_NAME, BadInput, Loaded, Problem, find_config, load_settings, usual_places
from gpuboss.units import format_bytes

app = typer.Typer(
    help="Show and check the configuration.",
    no_args_is_help=True,
    epilog=f"Example: model-boss config check. {EXIT_CODES}",
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The configuration file; otherwise the usual places are searched."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_or_fail(config: Path | None, flags: dict[str, object] | None = None) -> Loaded:
    """The configuration, or every problem of it on standard error and exit status 2."""
    try:
        return load_settings(config, flags)
    except BadInput as error:
        fail(_report(error.problems), ExitCode.USAGE)


@app.command(epilog="Example: model-boss config show --json")
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Every setting, its value, and where it comes from."""
    loaded = load_or_fail(config)
    values = loaded.settings.model_dump(mode="json") | {"manifests": str(loaded.settings.manifests_dir)}
    rows = [(key, value, loaded.origin(key)) for key, value in _flat(values)]
    rows.append(("api_key", "set" if loaded.settings.api_key else None, loaded.origin("api_key")))
    if as_json:
        settings = {key: {"value": value, "from": origin} for key, value, origin in rows}
        print_json({"file": str(loaded.file) if loaded.file else None, "settings": settings})
        return
    print_table(("key", "value", "from"), [(key, _shown(key, value), origin) for key, value, origin in rows])


@app.command(epilog="Example: model-boss config path")
def path(config: ConfigOption = None) -> None:
    """The configuration file in use."""
    try:
        found = find_config(config, os.environ, Path.cwd())
    except BadInput as error:
        fail(_report(error.problems), ExitCode.USAGE)
    if found is None:
        places = "\n  ".join(str(place) for place in usual_places(os.environ, Path.cwd()))
        fail(f"there is no configuration file, and everything is at its default; searched:\n  {places}")
    typer.echo(str(found))


@app.command(epilog="Example: model-boss config schema > model-boss.schema.json")
def schema(
    manifest: Annotated[bool, typer.Option("--manifest", help="The schema of a manifest instead.")] = False,
) -> None:
    """JSON schema of model-boss.yaml, for editors."""
    from coordinator.settings import manifest_schema, settings_schema

    print_json(manifest_schema() if manifest else settings_schema())


@app.command(epilog="Example: model-boss config check --config /etc/model-boss/model-boss.yaml")
def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check the configuration, every manifest and the header of every model file."""
    from inference.registry import Registry

    try:
        loaded = load_settings(config)
    except BadInput as error:
        _print_check(None, 0, error.problems, (), as_json=as_json)
        raise typer.Exit(ExitCode.FAILED) from error
    registry = Registry.load(loaded.settings.model_sources())
    good = sum(model.problem is None for model in registry.models.values())
    _print_check(loaded.file, good, registry.problems, registry.warnings, as_json=as_json)
    if registry.problems:
        raise typer.Exit(ExitCode.FAILED)


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")] = Path(),
    models: Annotated[
        list[Path] | None, typer.Option("--models", help="A folder of GGUF files to serve; may be repeated.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Write a commented model-boss.yaml and an example manifest."""
    from coordinator.config_template import config_template, manifest_template

    models_dirs = tuple(path.expanduser().absolute() for path in models or ())
    for models_dir in models_dirs:
        if not models_dir.is_dir():
            fail(f"--models: {models_dir} is not a folder", ExitCode.USAGE)
    files = {
        folder / CONFIG_NAME: config_template(models_dirs),
        folder / "manifests" / "example.yaml": manifest_template(),
    }
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        fail(f"{' and '.join(existing)} already {verb}; --force overwrites")
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(f"{file} cannot be written: {error.strerror}")
        typer.echo(f"wrote {file}")
    typer.echo("next: model-boss config check, then model-boss serve")


def _print_check(
    file: Path | None, good: int, problems: tuple[Problem, ...], warnings: tuple[Problem, ...], *, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "ok": not problems,
                "file": str(file) if file else None,
                "models": good,
                "problems": [_as_dict(problem) for problem in problems],
                "warnings": [_as_dict(warning) for warning in warnings],
            }
        )
        return
    for warning in warnings:
        typer.echo(f"warning: {warning}")
    for problem in problems:
        typer.echo(f"problem: {problem}")
    counts = [count(good, "servable model"), count(len(problems), "problem"), count(len(warnings), "warning")]
    typer.echo(", ".join(counts))


def _report(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    return f"the configuration has {len(problems)} problems:\n  " + "\n  ".join(map(str, problems))


def _as_dict(problem: Problem) -> dict[str, Any]:
    return {"where": problem.where, "line": problem.line, "message": problem.message}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def _shown(key: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case int() if key == "reserve":
            return format_bytes(value)
        case list():
            return ", ".join(_shown(key, item) for item in value) or "-"
        case {"id": name, "kind": kind, "vram": int(size)}:
            return f"{name}={format_bytes(size)} ({kind})"
        case _:
            return str(value)
