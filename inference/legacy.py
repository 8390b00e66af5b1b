"""What an engine leaves to the next broker if this one dies: where it is, and what was known of it.

Used by `engine_run.py`, one per life of an engine. Tells the engine's shim, which keeps it in a private file
(`orphans.py`).
"""

from __future__ import annotations

from pathlib import Path

import structlog

from gpuboss.errors import StateDirError
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Lease
from gpuboss.state_dir import StateDir
from inference import orphans
from inference.orphans import Past
from inference.process import ReadyOrder, Shim

__all__ = ["Legacy"]

_log = structlog.get_logger(__name__)


class Legacy:
    """See the module."""

    def __init__(self, state: StateDir, slot_id: str, model_id: str, grace_s: float | None) -> None:
        """`grace_s`: how long a ready engine waits for the next broker; None: it ends with this one."""
        self._state = state
        self._slot_id = slot_id
        self._model_id = model_id
        self._grace_s = grace_s
        self._fingerprint = ""
        self._socket: Path | None = None
        self._api_key = ""

    @property
    def is_wanted(self) -> bool:
        """Whether the engine is to outlive this broker."""
        return self._grace_s is not None

    def note(self, fingerprint: str, socket: Path, api_key: str) -> None:
        """The engine is about to run, or was found: by which definition it was started, and how it is reached."""
        self._fingerprint, self._socket, self._api_key = fingerprint, socket, api_key

    def hand_over(self, shim: Shim, lease: Lease, load_s: float) -> None:
        """The engine serves: from now on it waits for the next broker if this one dies."""
        if self._grace_s is None:
            return
        assert self._socket is not None
        assert lease.fence is not None, "a granted lease has a fence"
        broker = ProcessIdentity.current()
        past = Past(
            *(self._slot_id, self._model_id, self._fingerprint, broker, self._socket, self._api_key),
            *(lease.id, lease.fence, lease.shares, load_s),
        )
        try:
            file, door = orphans.file_for(self._state, lease.id), orphans.door_for(self._state, lease.id)
        except (OSError, StateDirError) as error:
            _log.warning("engine_ends_with_broker", slot=self._slot_id, error=str(error))
            return
        shim.ready(ReadyOrder(str(file), str(door), self._grace_s, orphans.told_of(past)))

    def forget(self, lease: Lease) -> None:
        """The engine's story is over; its shim has told nobody any more, unless it was killed."""
        orphans.forget(self._state, lease)
