"""`model-boss ps`: what is in memory, who waits, and who else uses the devices. Registered by the package's `app`."""

from __future__ import annotations

import time
from typing import Any

import typer

from coordinator.cli.link import ConfigOption, JsonOption, Link, LinkError, UrlOption, connect
from coordinator.cli.output import about, print_json, print_table, say
from gpuboss.units import format_bytes

_OF_DEVICES = ("devices", "external", "leases")
"""What is shown of /api/v1/devices."""
_SLOT_COLUMNS = (
    *("model", "state", "devices", ">claimed", ">used", ">in flight", ">waiting", ">load s", "stays until", ">pid"),
    "note",
)


def ps(url: UrlOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show what is in memory: models, their state and claims, who waits, the devices, and who else uses them."""
    link = connect(url, config)
    with link.reading():
        slots = link.look("/api/v1/slots")["slots"]
        queue = link.look("/api/v1/queue")["queue"]
        devices = _devices(link)
        if json:
            print_json({"slots": slots, "queue": queue} | {key: devices.get(key, []) for key in _OF_DEVICES})
        else:
            _print(slots, queue, devices)


def _devices(link: Link) -> dict[str, Any]:
    try:
        return dict(link.get("/api/v1/devices"))
    except LinkError as error:  # the store is away; the rest is still worth showing
        say(f"devices: {error.message}", fg="yellow", err=True)
        return {"devices": [], "external": [], "leases": []}


def _print(slots: list[dict[str, Any]], queue: list[dict[str, Any]], devices: dict[str, Any]) -> None:
    rows = _slot_rows(slots, queue)
    if rows:
        print_table(_SLOT_COLUMNS, rows)
    else:
        typer.echo("no model is loaded; a request that names one loads it (`model-boss models` lists them)")
    if queue:
        columns = (">place", "waits for", "priority", "client", ">seconds", "its turn", "note")
        print_table(columns, map(_ticket_row, queue))
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


def _slot_rows(slots: list[dict[str, Any]], queue: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    waiting: dict[str, int] = {}
    for ticket in queue:
        waiting[ticket["model"]] = waiting.get(ticket["model"], 0) + 1
    rows: list[tuple[str, ...]] = []
    for slot in slots:
        count = waiting.pop(slot["model"], 0)
        if slot["state"] == "idle" and not count and not slot["trouble"]:
            continue
        claimed, used = sum(slot["devices"].values()), sum((slot["observed_bytes"] or {}).values())
        rows.append(
            (
                slot["slot"],
                "waiting" if slot["state"] == "idle" and count else _state(slot),
                " ".join(slot["devices"]) or "-",
                format_bytes(claimed) if claimed else "-",
                format_bytes(used) if used else "-",
                str(slot["in_flight"]),
                str(count),
                f"{slot['last_load_s']:.2f}" if slot["last_load_s"] is not None else "-",
                _stays(slot),
                str(slot["pid"] or "-"),
                _slot_note(slot),
            )
        )
    # Models that are waited for and have no slot yet.
    nothing = ("-", "-", "-")
    return rows + [(model, "waiting", *nothing, "0", str(count), *nothing, "") for model, count in waiting.items()]


def _stays(slot: dict[str, Any]) -> str:
    """Until when it stays loaded, by the clock."""
    if slot["pin"]:
        return "pinned"
    if slot["stays_s"] is None:
        return "-"
    return "in use" if slot["in_flight"] else _clock(slot["stays_s"])


def _slot_note(slot: dict[str, Any]) -> str:
    notes = []
    if slot["leaves_for"]:
        notes.append(f"leaves for {slot['leaves_for']}")
    if slot["yields_to"]:
        notes.append(f"asked to yield to {slot['yields_to']}")
    if slot["retry_s"] is not None:
        notes.append(f"starts again at {_clock(slot['retry_s'])} at the earliest")
    if slot["trouble"]:
        notes.append(slot["trouble"].splitlines()[0])
    return "; ".join(notes)


def _clock(seconds: float) -> str:
    """The time of day that many seconds from now; with the date where that is another day."""
    try:
        then = time.localtime(time.time() + seconds)
    except OSError as error:  # the calendar does not go so far
        raise ValueError(f"a time {seconds} s from now") from error
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def _state(slot: dict[str, Any]) -> str:
    fraction = slot.get("load_fraction")
    return f"{slot['state']} {fraction:.0%}" if fraction is not None and slot["state"] == "loading" else slot["state"]


def _ticket_row(ticket: dict[str, Any]) -> tuple[str, ...]:
    risen = ticket["counts_as"] != ticket["priority"]
    return (
        str(ticket["position"]),
        ticket["model"],
        f"{ticket['priority']}, as {ticket['counts_as']}" if risen else ticket["priority"],
        ticket["client_id"] or "-",
        f"{ticket['waited_s']:.1f}",
        about(ticket["eta_s"]) if ticket["eta_s"] is not None else "-",
        "has its earlier place" if ticket["kept_place"] else "",
    )


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
