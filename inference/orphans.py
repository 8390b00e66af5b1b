"""What is known of engines that may outlive their broker: one private file each, in the state directory.

Told by `legacy.py` when an engine serves (`told_of`), written and deleted by its shim (`shim_door.py` says what is in
it), read by the next broker's `adoption.py` (`find`). The folder is ours alone (0700), so are the files (0600): they
hold the engine's key and what proves a broker to the shim.

A file that is found is one of these:

1. not ours (by its name, its kind or its owner), or open to others: nobody can have written it but by mistake; it is
   left alone, and said
2. what a shim was killed over while it wrote it, something that cannot be understood, or a dead shim's: it is deleted,
   and so are those sockets it names that stand where ours do
3. its shim cannot be seen from here (another pid namespace), or its broker lives: it is nobody's to adopt
4. an orphan

No file is trusted beyond that: whatever one holds, the others are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog

from gpuboss.errors import StateDirError
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import Fence, Lease, Shares
from gpuboss.state_dir import StateDir
from gpuboss.wire import process_to_wire
from inference.takeover import SPOKEN, Address

__all__ = ["Foreigner", "Orphan", "Past", "door_for", "file_for", "find", "forget", "told_of"]

_FOLDER = "orphans"
_LARGEST = 64 << 10
_NAME = re.compile(r"[\w-]+\.json(?:\.(?P<writer>[1-9][0-9]{0,8}))?", re.ASCII)
"""A lease's file; with a pid, the draft of one."""
_MOST_PID = 2**31 - 1
_MOST = 2**63 - 1
"""Of any other whole number: what the ledger's books can hold."""
_LONGEST_LOAD_S = 1e9

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Past:
    """What an engine's broker knew of it."""

    slot_id: str
    model_id: str
    fingerprint: str
    """Of the definition by which it was started (`fingerprint.py`)."""
    broker: ProcessIdentity
    """The last to call it ready."""
    socket: Path
    """Where the engine listens."""
    api_key: str
    lease_id: str
    fence: Fence
    shares: Shares
    load_s: float
    """Seconds its load took."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """An engine whose broker is dead, under a shim that lives."""

    address: Address
    past: Past
    engine_pid: int

    @property
    def shim(self) -> ProcessIdentity:
        """The process that supervises it."""
        return self.address.shim


@dataclass(frozen=True, slots=True)
class Foreigner:
    """The same, where shim and file are of a version that we do not speak: it can only be ended."""

    shim: ProcessIdentity
    protocol: object
    """What it speaks: a number, or whatever word it has for it."""


def folder(state: StateDir) -> Path:
    """Where the files are; made if need be."""
    path = state.root / _FOLDER
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def file_for(state: StateDir, lease_id: str) -> Path:
    """The file of the engine that has this lease."""
    return folder(state) / f"{lease_id}.json"


def told_of(past: Past) -> dict[str, object]:
    """What the shim is to keep for the next broker."""
    return {
        "slot": past.slot_id,
        "model": past.model_id,
        "fingerprint": past.fingerprint,
        "broker": process_to_wire(past.broker),
        "socket": str(past.socket),
        "api_key": past.api_key,
        "lease": {
            "id": past.lease_id,
            "epoch": past.fence.epoch,
            "seq": past.fence.seq,
            "shares": dict(past.shares),
        },
        "load_s": past.load_s,
    }


def forget(state: StateDir, lease: Lease) -> None:
    """Delete what a shim that was killed could not: its file, a draft of it, and its socket."""
    file = state.root / _FOLDER / f"{lease.id}.json"
    for path in (file, *file.parent.glob(f"{file.name}.*"), door_for(state, lease.id)):
        path.unlink(missing_ok=True)


def door_for(state: StateDir, lease_id: str) -> Path:
    """Where the shim of the engine that has this lease waits for the next broker."""
    return state.socket_path(f"shim-{lease_id[:8]}")


def find(state: StateDir) -> list[Orphan | Foreigner]:
    """Every orphan there is, and tidy up what is left of others."""
    try:
        place = folder(state)
        if _is_private(place.stat(), stat.S_ISDIR):
            return list(_find_in(state, place))
        problem = "it must be our own, with mode 0700"  # 1
    except OSError as error:
        problem = str(error)
    _log.warning("orphans_unread", path=str(state.root / _FOLDER), problem=problem)
    return []


def _find_in(state: StateDir, place: Path) -> Iterator[Orphan | Foreigner]:
    for file in sorted(place.iterdir()):
        name = _NAME.fullmatch(file.name)
        if name is not None and name["writer"] and psutil.pid_exists(int(name["writer"])):
            continue  # it is being written
        text = _read(file) if name is not None else None
        if text is None:  # 1
            problem = "it must be a file of our own, with mode 0600 and the name of a lease"
            _log.warning("orphan_unread", path=str(file), problem=problem)
            continue
        found = _understand(file, text)
        if found is None or found.shim.is_alive() is Liveness.DEAD:  # 2
            _clear(state, file, found)
        elif found.shim.is_alive() is Liveness.UNKNOWN or _has_broker(found):  # 3
            _log.info("not_an_orphan", path=str(file), shim=found.shim.pid)
        else:
            yield found  # 4


def _understand(file: Path, text: str) -> Orphan | Foreigner | None:
    try:
        record = json.loads(text)
        shim, protocol = _process(record["shim"]), record["protocol"]
        if protocol not in SPOKEN:
            return Foreigner(shim, protocol if protocol is None or type(protocol) is int else _word(protocol))
        address = Address(shim, _path(record["socket"]), _word(record["secret"]), protocol)
        return Orphan(address, _past(record["told"]), _process(record["engine"]).pid)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        _log.warning("orphan_unread", path=str(file), problem=repr(error))
        return None


def _has_broker(found: Orphan | Foreigner) -> bool:
    """As far as can be seen; a broker lives or dies unseen in another pid namespace only where its shim does too."""
    return isinstance(found, Orphan) and found.past.broker.is_alive() is not Liveness.DEAD


def _past(told: Mapping[str, Any]) -> Past:
    lease = told["lease"]
    return Past(
        slot_id=_word(told["slot"]),
        model_id=_word(told["model"]),
        fingerprint=_word(told["fingerprint"]),
        broker=_process(told["broker"]),
        socket=_path(told["socket"]),
        api_key=_word(told["api_key"]),
        lease_id=_word(lease["id"]),
        fence=Fence(_whole(lease["epoch"]), _whole(lease["seq"])),
        shares={_word(device): _whole(share) for device, share in dict(lease["shares"]).items()},
        load_s=_seconds(told["load_s"]),
    )


# -- one value of a file; the errors do not repeat it, for it may be a key --------------------------------------------


def _process(wire: Mapping[str, Any]) -> ProcessIdentity:
    return ProcessIdentity(
        boot_id=_word(wire["boot_id"]),
        pid=_whole(wire["pid"], least=1, most=_MOST_PID),
        pid_namespace=_whole(wire["pid_namespace"]),
        start_ticks=_whole(wire["start_ticks"]),
    )


def _word(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("text is missing, or cannot be printed")
    return value


def _path(value: object) -> Path:
    if not isinstance(value, str) or b"\0" in os.fsencode(value) or not value.startswith("/"):
        raise ValueError("a path is none")
    return Path(value)


def _whole(value: object, *, least: int = 0, most: int = _MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a number is none from {least} to {most}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_LOAD_S:
        raise ValueError(f"a time is none from 0 to {_LONGEST_LOAD_S:.0f} s")
    return float(value)


# -- files -------------------------------------------------------------------------------------------------------------


def _clear(state: StateDir, file: Path, found: Orphan | Foreigner | None) -> None:
    sockets = [found.address.socket, found.past.socket] if isinstance(found, Orphan) else []
    for path in (file, *(socket for socket in sockets if _is_own_socket(state, socket))):
        with contextlib.suppress(OSError):
            path.unlink()


def _is_own_socket(state: StateDir, path: Path) -> bool:
    """Whether it is a shim's or an engine's, and stands where this state directory has the socket of that name."""
    if not path.name.startswith(("shim-", "engine-")):
        return False
    try:
        return stat.S_ISSOCK(path.lstat().st_mode) and path == state.socket_path(path.stem)
    except (OSError, StateDirError):
        return False


def _read(file: Path) -> str | None:
    """The text of a file that is ours alone; None for any other; empty for one that has just gone."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    try:
        if not _is_private(os.fstat(handle), stat.S_ISREG):
            return None
        return os.read(handle, _LARGEST).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(handle)


def _is_private(status: os.stat_result, is_kind: Any) -> bool:
    return bool(is_kind(status.st_mode)) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
