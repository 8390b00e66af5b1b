"""What `model-boss doctor` looks at: one function per check, which finds what is right and what is not, with a remedy.

Called by `doctor.py`. Starts nothing and changes nothing, but makes the state directory where it is missing.
"""

from __future__ import annotations

import platform
import shutil
import stat
from collections.abc import Iterator
from importlib.metadata import version

from coordinator.config_files import Loaded
from coordinator.settings import Settings
from gpuboss.cli.findings import LITTLE_DISK_BYTES, Finding, Verdict
from gpuboss.devices import Device, DeviceKind, Probe, discover
from gpuboss.errors import GpubossError, StoreUnfit
from gpuboss.store_url import shown
from gpuboss.units import format_bytes


def check_program() -> Iterator[Finding]:
    """Versions, for reports."""
    system = f"{platform.system()} {platform.machine()}"
    text = f"Model Boss {version('model-boss')}, Python {platform.python_version()}, {system}"
    yield Finding("program", Verdict.OK, text)


def check_config(loaded: Loaded) -> Iterator[Finding]:
    """The file in use, and who may change it."""
    if loaded.file is None:
        yield Finding("config", Verdict.OK, "no configuration file; everything is at its default")
        return
    yield Finding("config", Verdict.OK, f"{loaded.file}")
    manifests = loaded.settings.manifests_dir
    for path in (loaded.file, manifests, *manifests.glob("*.y*ml")):
        if path.exists() and path.stat().st_mode & stat.S_IWOTH:
            text = f"{path} may be written by every user, and it decides which programs run with your rights"
            yield Finding("permissions", Verdict.BROKEN, text, f"chmod o-w {path}")


def check_access(settings: Settings) -> Iterator[Finding]:
    """Who may call."""
    from coordinator.security import UnsafeBind, check_bind

    try:
        check_bind(settings.host, loopback=settings.is_loopback, api_key=settings.api_key)
    except UnsafeBind as error:
        yield Finding("access", Verdict.BROKEN, str(error))
        return
    key = "with an API key" if settings.api_key else "without an API key"
    yield Finding("access", Verdict.OK, f"{settings.host}, {key}")


def check_port(settings: Settings) -> Iterator[Finding]:
    """Whether the port is free, or a broker's."""
    from coordinator.listen import CannotListen, listen

    where = f"{settings.host}:{settings.port}"
    try:
        listen(settings.host, settings.port).close()
    except CannotListen as error:
        if _is_broker(settings):
            yield Finding("port", Verdict.OK, f"a Model Boss answers on {where}")
        else:
            yield Finding("port", Verdict.BROKEN, str(error))
        return
    yield Finding("port", Verdict.OK, f"{where} is free")


def check_state(settings: Settings) -> Iterator[Finding]:
    """The state directory."""
    from gpuboss.state_dir import StateDir

    try:
        root = StateDir.resolve(settings.state_dir).root
    except GpubossError as error:
        yield Finding("state", Verdict.BROKEN, error.message)
        return
    free = shutil.disk_usage(root).free
    if free < LITTLE_DISK_BYTES:
        text = f"{root}: the disk has {format_bytes(free)} left"
        yield Finding("state", Verdict.WARNING, text, "make room, or set state_dir to another disk")
    else:
        yield Finding("state", Verdict.OK, f"{root} can be written, {format_bytes(free)} free")


def check_store(settings: Settings) -> Iterator[Finding]:
    """The lease store: the named one answers, or a private one can be started."""
    import asyncio

    from gpuboss.server import find_server

    try:
        if settings.store is None:
            yield Finding("store", Verdict.OK, f"a private one, run by {find_server()}")
            return
        warnings = asyncio.run(_ask_store(settings.store))
    except GpubossError as error:
        remedy = None if settings.store is None else f"start it, or change `store` ({shown(settings.store)})"
        yield Finding("store", Verdict.BROKEN, error.message, remedy)
        return
    yield Finding("store", Verdict.OK, f"{shown(settings.store)} answers")
    for warning in warnings:
        yield Finding("store", Verdict.WARNING, warning)


def check_devices(settings: Settings) -> Iterator[Finding]:
    """The devices, each with what is in use."""
    try:
        probes = discover(settings.device_specs(), settings.reserve_bytes)
        for probe in probes:
            yield from _readings(probe)
    except GpubossError as error:
        yield Finding("devices", Verdict.BROKEN, error.message, "check the driver, or declare `devices`")


def check_engine(settings: Settings) -> Iterator[Finding]:
    """The llama-server that is used, and whether it suits the devices."""
    from inference.engines.accelerator import detect, this_machine
    from inference.engines.resolve import list_llama_servers

    candidates = list_llama_servers(settings.engines.llama_server)
    used = next((candidate for candidate in candidates if candidate.problem is None), None)
    first = candidates[0]
    if first.outright and first.problem is not None:
        text = f"{first.origin} names {first.path}, which {first.problem}"
        yield Finding("engine", Verdict.BROKEN, text, "correct or remove that setting")
        return
    if used is None:
        text = "no llama-server: " + "; ".join(str(candidate.problem) for candidate in candidates)
        yield Finding("engine", Verdict.BROKEN, text, "model-boss engines install llama-server")
        return
    if used.complaint is not None:
        yield Finding(
            "engine", Verdict.BROKEN, f"{used.path} {used.complaint}", "name another llama-server, or install one"
        )
        return
    kind = f", {used.accelerator}" if used.accelerator else ""
    yield Finding("engine", Verdict.OK, f"llama-server {used.version} ({used.origin}{kind}): {used.path}")
    best = detect(this_machine())
    if used.accelerator == "cpu" and best.accelerator != "cpu":
        text = f"it was built for the processor alone, and this machine has {best.why}"
        yield Finding("engine", Verdict.WARNING, text, "model-boss engines install llama-server")
    elif used.accelerator == "cpu" and best.hint is not None:
        yield Finding("engine", Verdict.WARNING, best.hint)


def check_models(settings: Settings) -> Iterator[Finding]:
    """Every model and manifest."""
    from inference.registry import Registry

    registry = Registry.load(settings.model_sources())
    good = sum(model.problem is None for model in registry.models.values())
    for problem in registry.problems:
        yield Finding("models", Verdict.BROKEN, str(problem))
    for warning in registry.warnings:
        yield Finding("models", Verdict.WARNING, str(warning))
    if good or registry.problems:
        yield Finding("models", Verdict.OK, f"{good} {'model' if good == 1 else 'models'} can be served")
    else:
        remedy = "put GGUF files into a folder and name it with --models-dir or `models_dirs`"
        yield Finding("models", Verdict.WARNING, "no models found", remedy)


def _readings(probe: Probe) -> Iterator[Finding]:
    readings = {reading.device_id: reading for reading in probe.read(())}
    for device in probe.devices():
        reading = readings.get(device.id)
        used = (
            "not measured"
            if reading is None or reading.used_bytes is None
            else f"{format_bytes(reading.used_bytes)} used"
        )
        yield Finding("devices", Verdict.OK, f"{_name(device)}: {format_bytes(device.total_bytes)}, {used}")
        if device.kind is not DeviceKind.SIM and device.total_bytes <= device.reserve_bytes:
            text = f"{device.id}: nothing may be leased, for {format_bytes(device.reserve_bytes)} are kept in reserve"
            yield Finding("devices", Verdict.WARNING, text, "lower `reserve`")


def _name(device: Device) -> str:
    return device.id if device.name in {"", device.id} else f"{device.id} ({device.name})"


def _is_broker(settings: Settings) -> bool:
    """Whether what listens there is a Model Boss."""
    import http.client
    import json

    from coordinator.cli.link import reachable

    connection = http.client.HTTPConnection(reachable(settings.host), settings.port, timeout=2)
    try:
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read())
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return isinstance(answer, dict) and {"status", "problems", "uptime_s"} <= answer.keys()


async def _ask_store(url: str) -> list[str]:
    from gpuboss.settings import Timings
    from gpuboss.store import Store

    try:
        store = Store(url, Timings())
    except ValueError as error:
        raise StoreUnfit(f"`store` names no store: {error}") from error
    try:
        return await store.check_fitness()
    finally:
        await store.close()
