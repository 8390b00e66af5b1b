"""`model-boss explain`: why a request for a model would wait, and who would go for it. Registered by the package's
`app`; asks `api/explain.py`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coordinator.cli.link import ConfigOption, JsonOption, UrlOption, connect
from coordinator.cli.output import ExitCode, about, print_json, print_table, say
from coordinator.cli.status import ModelArgument
from gpuboss.units import format_bytes

_VERDICTS = {
    "ready": ("it would be served at once", "green"),
    "fits": ("it would be loaded into free memory", "green"),
    "evicts": ("it would be loaded, and others would go for it", "yellow"),
    "loading": ("it is being loaded, or its memory is on its way", "yellow"),
    "waits": ("it would wait", "yellow"),
    "refused": ("it would be refused", "red"),
}
"""What each verdict means, and its colour."""


def explain(
    model: ModelArgument,
    priority: Annotated[str, typer.Option(help="The class it would ask in, or 0 to 1000.")] = "normal",
    url: UrlOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Say what would become of a request for a model now: would it wait, for what, and who would go for it.

    Nothing is loaded, evicted or queued by asking. Exit status 1 when the request would be refused.
    """
    link = connect(url, config)
    with link.reading():
        told = link.look("/api/v1/explain", model=model, priority=priority)
        refused = told["verdict"] == "refused"
        if json:
            print_json(told)
        else:
            _print(told)
    if refused:
        raise typer.Exit(ExitCode.FAILED)


def _print(told: dict[str, Any]) -> None:
    words, colour = _VERDICTS.get(told["verdict"], (told["verdict"], None))
    say(f"{told['model']} (class {told['priority']}, needs {format_bytes(told['need_bytes'])}): ", nl=False)
    say(words, fg=colour)
    if told["refusal"]:
        say(f"  {told['refusal']}")
    if told["position"]:
        eta = f", {about(told['eta_s'])}" if told["eta_s"] is not None else ""
        say(f"  place {told['position']} of {told['waiting']} in the queue{eta}")
    for option in told["options"][:1]:
        where = ", ".join(f"{format_bytes(size)} on {device}" for device, size in option.items())
        say(f"  goes to: {where}")
    if told["victims"]:
        columns = ("would go", ">frees", "class", ">in flight", ">idle s", ">reload s")
        print_table(columns, map(_victim_row, told["victims"]))
    if told["blocked_by"]:
        print_table(("waits for", ">holds", "why"), map(_blocker_row, told["blocked_by"]))
    print_table((">device", ">total", ">reserve", ">others", ">claimed", ">free"), map(_device_row, told["devices"]))


def _victim_row(victim: dict[str, Any]) -> tuple[str, ...]:
    seconds = (f"{victim[key]:.1f}" if victim[key] is not None else "-" for key in ("idle_s", "reload_s"))
    return (
        victim["slot"],
        format_bytes(victim["freed_bytes"]),
        victim["priority"],
        str(victim["in_flight"]),
        *seconds,
    )


def _blocker_row(blocker: dict[str, Any]) -> tuple[str, ...]:
    return (blocker["name"], format_bytes(blocker["held_bytes"]) if blocker["held_bytes"] else "-", blocker["why"])


def _device_row(device: dict[str, Any]) -> tuple[str, ...]:
    keys = ("total_bytes", "reserve_bytes", "others_bytes", "claimed_bytes", "free_bytes")
    return (device["id"], *(format_bytes(device[key]) for key in keys))
