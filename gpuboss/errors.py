"""Everything that can go wrong with the ledger of device memory.

    GpubossError
    |- StateDirError          the state directory cannot be used: not writable, on a network, disk full
    |- LockHeld               another process holds the lock that makes it the only one of its kind on this host
    |- LedgerConflict         a running ledger has other devices or another store than this process came with
    |- DeviceError            devices were declared wrongly, or a device's driver gives no sensible answer
    |- StoreUnavailable       the lease store does not answer
    |- StoreUnfit             the store may not be used for leases: it evicts keys, or holds another version's data
    |- NoEpoch                the store began a new life and this node has not synced with it yet
    |- StaleFence             a command for a lease that is over, or whose fence is another's; it changed nothing
    |- LeaseRefused           a lease that can never be granted, with numbers
    |- WaitExpired            a lease was not granted in the time its asker would wait, with place, holders and numbers
    |- ActivationRefused      the node's own books say that the memory is not there now, with numbers
    |- LedgerBusy             the node ledger stayed locked by another process
    '- LedgerDamaged          the node ledger's file is not one, or is of another version

Messages are written for people, carry numbers, and name the setting to change. Stdlib only and light: the shim
imports it.
"""

from __future__ import annotations

from gpuboss.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class GpubossError(Exception):
    """Base of all errors of this package; the message is fit to be shown to the caller."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StateDirError(GpubossError):
    """The state directory cannot be used; the message names path, owner and the setting (`GPUBOSS_STATE_DIR`)."""


class LockHeld(GpubossError):
    """Another process holds a lock that only one process of this host may hold."""

    def __init__(
        self,
        path: str,
        *,
        owner_pid: int | None,
        owner_command: str | None,
        owner_note: str | None,
        owner_user: str | None = None,
    ) -> None:
        self.path = path
        self.owner_pid = owner_pid
        """The owner's pid as it recorded it; None when it did not get round to that, or may not write there."""
        self.owner_command = owner_command
        self.owner_note = owner_note
        """What the owner said it holds the lock for, e.g. its state directory."""
        self.owner_user = owner_user
        """Whose process it is; None where that is not known."""
        who = "a process that left no name" if owner_pid is None else f"process {owner_pid}"
        who += f" of {owner_user}" if owner_user else ""
        command = f" ({owner_command})" if owner_command else ""
        note = f", for {owner_note}" if owner_note else ""
        super().__init__(f"{path} is locked by {who}{command}{note}")


class LedgerConflict(GpubossError):
    """A running ledger has other devices or another store than this process came with; the message names both."""


class DeviceError(GpubossError):
    """Devices were declared wrongly, or a device's driver gives no sensible answer."""


class StoreUnavailable(GpubossError):
    """The lease store does not answer; what runs goes on, new leases wait."""


class StoreUnfit(GpubossError):
    """The store may not be used for leases: there is none, it would evict keys, or it holds another version's data."""


class NoEpoch(GpubossError):
    """The store began a new life, and this node has not synced its devices and holders with it yet."""


class StaleFence(GpubossError):
    """A command for a lease that is over, or whose fence is another's; it changed nothing."""


class LeaseRefused(GpubossError):
    """A lease that can never be granted on these devices; the message carries the numbers."""


class WaitExpired(GpubossError):
    """A lease was not granted in the time its asker would wait; it has left the queue.

    The message says what was wanted, what was free, who held the rest, and how many waiters came first.
    """

    def __init__(
        self,
        holder: str,
        *,
        waited_s: float,
        wanted: str,
        position: int | None = None,
        devices: Sequence[tuple[str, int]] = (),
        holders: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.holder = holder
        self.waited_s = waited_s
        self.wanted = wanted
        """What was asked for, in words, e.g. "20GiB of sim0"."""
        self.position = position
        """1-based place in the queue when it gave up; None when it had not joined it."""
        self.devices = tuple(devices)
        """(device, bytes free on it), of the devices that it could have been granted on."""
        self.holders = tuple(holders)
        """(holder, bytes it holds of these devices), largest first."""
        free = ", ".join(f"{name} has {format_bytes(count)} free" for name, count in self.devices) or "nothing is known"
        held = ", ".join(f"{name} {format_bytes(count)}" for name, count in self.holders) or "nobody"
        place = f"; it was number {position} in the queue" if position is not None else ""
        waited = f"was not granted within {waited_s:g} s" if waited_s > 0 else "cannot be granted at once"
        super().__init__(f"{holder} {waited}: {wanted} wanted, {free}; held by {held}{place}")


class ActivationRefused(GpubossError):
    """The node's own books say that the memory is not there now, whatever the store granted.

    Raised by `NodeLedger.admit` inside the transaction that would have taken the memory. Nothing was written.
    """

    def __init__(
        self,
        device_id: str,
        *,
        wanted_bytes: int,
        free_bytes: int,
        settling_bytes: int = 0,
        holders: Sequence[tuple[str, int]] = (),
        detail: str = "",
    ) -> None:
        self.device_id = device_id
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes
        """Effective free of the device; negative when more is in use than may be."""
        self.settling_bytes = settling_bytes
        """What no reading has told of yet: ended holders' memory, or (where `detail` says so) that of one that just
        began. Another look of the keeper (`sweep`) will tell, and then it is worth another try."""
        self.holders = tuple(holders)
        """(holder, bytes it counts for), largest first."""
        held = ", ".join(f"{name} {format_bytes(count)}" for name, count in self.holders) or "nobody"
        wanted, free = format_bytes(wanted_bytes), format_bytes(free_bytes)
        if wanted == free:  # rounded to the same: only the bytes tell why it does not fit
            wanted, free = f"{wanted_bytes} bytes", f"{free_bytes} bytes"
        message = f"{device_id}: {wanted} wanted, {free} free; held by {held}{detail}"
        if settling_bytes and not detail:
            message += f"; {format_bytes(settling_bytes)} of ended holders, not yet read to be back"
        super().__init__(message)


class LedgerBusy(GpubossError):
    """The node ledger stayed locked by another process for the whole waiting time."""


class LedgerDamaged(GpubossError):
    """The node ledger's file is not a ledger, is damaged, or was written by another version."""
