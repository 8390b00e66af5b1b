"""What `gpuboss doctor` looks at: one function per check, each finding with its remedy.

Called by `gpuboss.cli.doctor`. The order is that of need: what is broken first is mostly why the rest is. A keeper is
started where none runs, for whether it starts is the question.
"""

from __future__ import annotations

import argparse
import asyncio
import grp
import importlib.util
import os
import platform
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from gpuboss import errors
from gpuboss.cli import words
from gpuboss.cli.findings import LITTLE_DISK_BYTES, Finding, Verdict
from gpuboss.cli.node import Node, look
from gpuboss.cli.output import connect, settings_of
from gpuboss.cli.parser import own_version
from gpuboss.devices import DeviceKind
from gpuboss.host_lock import read_owner
from gpuboss.server import find_server
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import STATE_DIR_VARIABLE, SYSTEM_DIR, StateDir
from gpuboss.store_url import shown
from gpuboss.units import format_bytes

__all__ = ["examine"]

_NVIDIA_CONTROL = Path("/dev/nvidiactl")


def examine(told: argparse.Namespace) -> Iterator[Finding]:
    """Every check whose ground the ones before have not taken away."""
    yield Finding(
        "program",
        Verdict.OK,
        f"gpuboss {own_version()}, Python {platform.python_version()}, {platform.system()}",
    )
    try:
        settings = settings_of(told)
    except errors.DeviceError as error:
        yield Finding("settings", Verdict.BROKEN, error.message, "correct or unset GPUBOSS_DEVICES")
        return
    yield from _settings(settings)
    try:
        state = StateDir.resolve(settings.state_dir)
    except errors.StateDirError as error:
        yield Finding("state", Verdict.BROKEN, error.message, f"make it usable, or set {STATE_DIR_VARIABLE}")
        return
    yield from _state(state)
    yield from _permissions(state)
    yield from _server(settings)
    yield from _drivers(settings)
    running = read_owner(state.lock_path("keeper"))
    try:
        node = asyncio.run(_look(told))
    except errors.GpubossError as error:
        yield Finding("keeper", Verdict.BROKEN, error.message, f"see {state.log_dir / 'keeper.log'}")
        return
    began = "it runs" if running.alive and running.pid == node.keeper_pid else "none ran, so one was started"
    yield Finding("keeper", Verdict.OK, f"process {node.keeper_pid}; {began}")
    yield from _store(node)
    yield from _devices(node)
    yield from _books(node)


async def _look(told: argparse.Namespace) -> Node:
    async with await connect(told) as client:
        return await look(client)


def _settings(settings: LedgerSettings) -> Iterator[Finding]:
    declared = settings.devices is not None
    text = "declared devices" if declared else "the devices that are found"
    where = shown(settings.store_url) if settings.store_url else "a private store"
    yield Finding("settings", Verdict.OK, f"{text}, {where}")


def _state(state: StateDir) -> Iterator[Finding]:
    free = shutil.disk_usage(state.root).free
    shared = state.root.stat().st_mode & 0o2020 == 0o2020
    whose = f"shared by the group {_group(state.root)}" if shared else "of this user alone"
    if free < LITTLE_DISK_BYTES:
        text = f"{state.root}: the disk has {format_bytes(free)} left"
        yield Finding("state", Verdict.WARNING, text, f"make room, or set {STATE_DIR_VARIABLE} to another disk")
    else:
        yield Finding("state", Verdict.OK, f"{state.root}, {whose}; {format_bytes(free)} free")
    if not shared and not SYSTEM_DIR.is_dir() and _is_multi_user():
        text = "other users of this host have ledgers of their own, and each GPU serves one ledger only"
        remedy = f"sudo install -d -m 2770 -g gpuboss {SYSTEM_DIR}   (after: sudo groupadd gpuboss)"
        yield Finding("state", Verdict.WARNING, text, remedy)


def _permissions(state: StateDir) -> Iterator[Finding]:
    """Files that we could not use, and files that others could."""
    well = True
    for path in (
        state.ledger_path,
        *state.locks_dir.iterdir(),
        state.socket_path("keeper"),
        state.log_dir / "keeper.log",
    ):
        if not path.exists():
            continue
        if not os.access(path, os.R_OK | os.W_OK):
            well = False
            text = f"{path} cannot be read and written by us (owner {_owner(path)}, mode {_mode(path)})"
            yield Finding(
                "permissions", Verdict.BROKEN, text, f"sudo chmod g+rw {path}, or use another state directory"
            )
        elif path.stat().st_mode & stat.S_IWOTH:
            well = False
            text = f"{path} may be written by everybody (mode {_mode(path)})"
            yield Finding("permissions", Verdict.BROKEN, text, f"chmod o-w {path}")
    if well:
        yield Finding(
            "permissions", Verdict.OK, f"{_mode(state.root)} on {state.root}, and files below it as they should be"
        )


def _server(settings: LedgerSettings) -> Iterator[Finding]:
    """The program of a private store."""
    if settings.store_url is not None:
        return
    try:
        yield Finding("server", Verdict.OK, f"private stores are run by {find_server()}")
    except errors.StoreUnfit as error:
        yield Finding("server", Verdict.BROKEN, error.message)


def _drivers(settings: LedgerSettings) -> Iterator[Finding]:
    """Cards that are there and cannot be seen."""
    if settings.devices is not None or not _NVIDIA_CONTROL.exists():
        return
    if importlib.util.find_spec("pynvml") is None:
        text = "this host has an NVIDIA driver, and the package that asks it is missing: its cards are not seen"
        yield Finding("drivers", Verdict.BROKEN, text, 'pip install "model-boss[nvidia]"')
    elif not os.access(_NVIDIA_CONTROL, os.R_OK | os.W_OK):
        text = f"{_NVIDIA_CONTROL} may not be used by us (mode {_mode(_NVIDIA_CONTROL)})"
        yield Finding("drivers", Verdict.BROKEN, text, f"join the group {_group(_NVIDIA_CONTROL)}")


def _store(node: Node) -> Iterator[Finding]:
    kind = "private" if node.private else "shared"
    text = f"{kind}, {node.store}, answered in {node.store_ms:.1f} ms; epoch {node.snapshot.epoch}"
    yield Finding("store", Verdict.OK, text)
    for warning in node.store_warnings:
        yield Finding("persistence", Verdict.WARNING, warning)
    if not node.store_warnings:
        yield Finding("persistence", Verdict.OK, "the store keeps an append-only file and evicts nothing")


def _devices(node: Node) -> Iterator[Finding]:
    for use in node.snapshot.devices:
        device = use.device
        name = words.device_name(device)
        text = (
            f"{name} ({device.name}): {format_bytes(device.total_bytes)}, {format_bytes(max(0, use.free_bytes))} free"
        )
        yield Finding("devices", Verdict.OK, text)
        if device.kind is not DeviceKind.SIM and device.total_bytes <= device.reserve_bytes:
            text = f"{name}: nothing may be leased, for {format_bytes(device.reserve_bytes)} are kept in reserve"
            yield Finding("devices", Verdict.WARNING, text, "lower the reserve")
    accelerators = [use for use in node.snapshot.devices if use.device.kind is not DeviceKind.CPU]
    if not accelerators:
        text = "no GPU was found: leases are on host memory (`--device cpu`)"
        yield Finding(
            "devices", Verdict.WARNING, text, "check the driver, or declare devices: GPUBOSS_DEVICES=sim0=8GiB"
        )
    for stranger in words.foreign(accelerators):
        yield Finding("devices", Verdict.WARNING, stranger, "gpuboss adopt --pid PID gives it a lease")


def _books(node: Node) -> Iterator[Finding]:
    for fault in node.faults:
        text = f"the store contradicts itself: {fault}"
        yield Finding("books", Verdict.BROKEN, text, "restart the store; the keepers tell it again what runs")
    for warning in node.node_warnings:
        yield Finding("books", Verdict.WARNING, warning)
    if not node.faults and not node.node_warnings:
        text = f"{len(node.rows)} holders in the node ledger, {len(node.snapshot.leases)} leases in the store"
        yield Finding("books", Verdict.OK, text)


def _is_multi_user() -> bool:
    """Whether more than one person's home directory is here."""
    home = Path("/home")
    return home.is_dir() and sum(entry.is_dir() for entry in home.iterdir()) > 1


def _mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


def _owner(path: Path) -> str:
    uid = path.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(path: Path) -> str:
    gid = path.stat().st_gid
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
