"""`model-boss ps|models|logs`: looking at a running broker. Registered by the package's `app`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.link import ConfigOption, JsonOption, LinkError, UrlOption, complete_model, connect, quoted
from coordinator.cli.output import print_json, print_table
from gpuboss.units import format_bytes

ModelArgument = Annotated[str, typer.Argument(help="A model's id or alias.", autocompletion=complete_model)]

FOLLOW_S = 0.5
"""Between two looks of `logs --follow`."""
_OF_DEVICES = ("devices", "external", "leases")
"""What is shown of /api/v1/devices."""
_WINDOW = 1000
"""Lines `logs --follow` compares to find what is new."""


def ps(url: UrlOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show what is in memory: models, their state and claims, who waits, the devices, and who else uses them."""
    link = connect(url, config)
    slots = link.look("/api/v1/slots")["slots"]
    queue = link.look("/api/v1/queue")["queue"]
    devices: dict[str, Any] = {"devices": [], "external": [], "leases": []}
    try:
        devices = link.get("/api/v1/devices")
    except LinkError as error:  # the store is away; the rest is still worth showing
        typer.secho(f"devices: {error.message}", fg="yellow", err=True)
    if json:
        print_json({"slots": slots, "queue": queue} | {key: devices.get(key, []) for key in _OF_DEVICES})
        return
    rows = _slot_rows(slots, queue)
    if rows:
        print_table(("model", "state", "devices", ">claimed", ">in flight", ">waiting", ">pid"), rows)
    else:
        typer.echo("no model is loaded; a request that names one loads it (`model-boss models` lists them)")
    if queue:
        print_table((">place", "waits for", "priority", "client", ">seconds"), map(_ticket_row, queue))
    if devices["devices"]:
        print_table((">device", ">total", ">claimed", ">others", ">free"), map(_device_row, devices["devices"]))
    external = devices.get("external", [])
    if others := _lease_rows(devices.get("leases", []), {f"service:{program['name']}" for program in external}):
        print_table(("leased to", "state", "priority", "devices", ">claimed", "note"), others)
    if external:
        columns = ("program", "state", "devices", ">claimed", ">used", ">pid", "note")
        print_table(columns, map(_external_row, external))
    if foreign := [row for device in devices["devices"] for row in _foreign_rows(device)]:
        print_table(("without a lease", ">pid", "device", ">uses"), foreign)


def models(url: UrlOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """List every model the broker knows, those that cannot be served included, with the reason."""
    known = connect(url, config).look("/api/v1/models")["models"]
    if json:
        print_json(known)
        return
    if not known:
        typer.echo("no models: put GGUF files into a folder listed under `models_dirs`, or write a manifest")
        return
    columns = ("model", "state", ">context", ">size", ">claim", "source", "problem")
    print_table(columns, [_model_row(model) for model in known])


def logs(
    model: ModelArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="How many lines.")] = 100,
    url: UrlOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print the log of a model's engine."""
    link = connect(url, config)
    path = f"/api/v1/models/{quoted(model)}/logs"
    answer = link.look(path, lines=lines)
    if json:
        print_json(answer)
        return
    for line in answer["lines"]:
        typer.echo(line)
    if not answer["lines"] and not follow:
        typer.echo(f"{answer['model']} has no log: it was not loaded since the broker started", err=True)
    if not follow:
        return
    seen = link.look(path, lines=_WINDOW)["lines"]
    while True:
        time.sleep(FOLLOW_S)
        now = link.look(path, lines=_WINDOW)["lines"]
        for line in added(seen, now):
            typer.echo(line)
        seen = now


def added(before: list[str], now: list[str]) -> list[str]:
    """The lines of the window `now` that came after those of the window `before`; all of them for a new file."""
    for length in range(min(len(before), len(now)), 0, -1):
        if before[-length:] == now[:length]:
            return now[length:]
    return now


def _slot_rows(slots: list[dict[str, Any]], queue: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    waiting: dict[str, int] = {}
    for ticket in queue:
        waiting[ticket["model"]] = waiting.get(ticket["model"], 0) + 1
    rows: list[tuple[str, ...]] = []
    for slot in slots:
        count = waiting.pop(slot["model"], 0)
        if slot["state"] == "idle" and not count:
            continue
        claimed = sum(slot["devices"].values())
        rows.append(
            (
                slot["model"],
                "waiting" if slot["state"] == "idle" else _state(slot),
                " ".join(slot["devices"]) or "-",
                format_bytes(claimed) if claimed else "-",
                str(slot["in_flight"]),
                str(count),
                str(slot["pid"] or "-"),
            )
        )
    # Models that are waited for and have no slot yet.
    return rows + [(model, "waiting", "-", "-", "0", str(count), "-") for model, count in waiting.items()]


def _state(slot: dict[str, Any]) -> str:
    fraction = slot.get("load_fraction")
    return f"{slot['state']} {fraction:.0%}" if fraction is not None and slot["state"] == "loading" else slot["state"]


def _ticket_row(ticket: dict[str, Any]) -> tuple[str, ...]:
    client = ticket["client_id"] or "-"
    return (str(ticket["position"]), ticket["model"], str(ticket["priority"]), client, f"{ticket['waited_s']:.1f}")


def _device_row(device: dict[str, Any]) -> tuple[str, ...]:
    others = device["foreign_bytes"] + device["residual_bytes"]
    sizes = (device["total_bytes"], device["claimed_bytes"], others, device["free_bytes"])
    return (device["id"], *map(format_bytes, sizes))


def _lease_rows(leases: list[dict[str, Any]], shown: set[str]) -> list[tuple[str, ...]]:
    """Jobs and services that hold memory or wait for it; models, and holders that are `shown` anyway, are not among
    them."""
    return [
        (
            lease["holder"],
            f"{lease['state']}, place {lease['position']}" if lease["position"] else lease["state"],
            lease["priority"],
            " ".join(lease["devices"]) or "-",
            format_bytes(sum(lease["devices"].values())) if lease["devices"] else "-",
            f"asked to yield to {lease['notice']['for']}" if lease["notice"] else "",
        )
        for lease in leases
        if lease["kind"] != "slot" and lease["holder"] not in shown
    ]


def _external_row(program: dict[str, Any]) -> tuple[str, ...]:
    claimed, used = sum(program["devices"].values()), program["used_bytes"]
    note = f"asked to yield to {program['notice']}" if program["notice"] else program["problem"] or ""
    return (
        program["name"],
        f"{program['state']}, busy" if program["busy"] else program["state"],
        " ".join(program["devices"]) or "-",
        format_bytes(claimed) if claimed else "-",
        format_bytes(used) if used is not None else "-",
        str(program["pid"] or "-"),
        note,
    )


def _foreign_rows(device: dict[str, Any]) -> list[tuple[str, ...]]:
    """The processes that use a device without a lease, by pid; a driver need not say how much."""
    return [
        (one["name"] or "-", str(one["pid"]), device["id"], format_bytes(one["bytes"]) if one["bytes"] else "-")
        for one in device.get("foreign", [])
    ]


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        model["id"],
        "broken" if model["problem"] else model["state"],
        str(model["context"] or "-"),
        format_bytes(model["size_bytes"]),
        format_bytes(model["claim_bytes"]),
        _short(model["source"]),
        model["problem"] or "",
    )


def _short(path: str) -> str:
    home = str(Path.home())
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path
