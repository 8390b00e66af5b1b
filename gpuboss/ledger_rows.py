"""The values that go into and come out of the node ledger.

Built by the shim (`LedgerRow`) and the keeper (`LedgerReading`), read back by both and by the command line
(`DeviceRow`).
"""

from __future__ import annotations

import time

from gpuboss import identity
from gpuboss.light import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class LedgerRow(Value):
    """One holder of device memory: which process, by which lease, how much of what."""

    __slots__ = (
        "engine_pid",
        "engine_start_ticks",
        "epoch",
        "holder",
        "lease_id",
        "pid",
        "pid_namespace",
        "seq",
        "shares",
        "since_s",
        "start_ticks",
    )
    lease_id: str
    """The lease it stands for; one row per lease."""
    epoch: int
    """First half of the lease's fence."""
    seq: int
    """Second half of the lease's fence."""
    holder: str
    """Shown to people, e.g. "slot:robin"."""
    shares: Mapping[str, int]
    """Device id -> bytes claimed."""
    pid: int
    """The holding process: the shim, or the job itself."""
    start_ticks: int
    """Its start time, as in `ProcessIdentity`."""
    pid_namespace: int
    """The namespace in which `pid` and `engine_pid` are numbers."""
    engine_pid: int | None
    """The engine the holder started; None before that."""
    engine_start_ticks: int | None
    """The engine's start time; None before it was started."""
    since_s: float
    """Wall clock, seconds since 1970, when the row was made."""

    def __init__(
        self,
        lease_id: str,
        epoch: int,
        seq: int,
        holder: str,
        shares: Mapping[str, int],
        pid: int,
        start_ticks: int,
        pid_namespace: int,
        engine_pid: int | None = None,
        engine_start_ticks: int | None = None,
        since_s: float | None = None,
    ) -> None:
        self._fill(lease_id=lease_id, epoch=epoch, seq=seq, holder=holder, shares=dict(shares))
        self._fill(pid=pid, start_ticks=start_ticks, pid_namespace=pid_namespace)
        self._fill(engine_pid=engine_pid, engine_start_ticks=engine_start_ticks)
        self._fill(since_s=time.time() if since_s is None else since_s)

    @property
    def process(self) -> identity.ProcessIdentity:
        """The holding process. The file is of this boot, so the row's process is too."""
        return identity.ProcessIdentity(identity.boot_id(), self.pid, self.pid_namespace, self.start_ticks)

    @property
    def engine(self) -> identity.ProcessIdentity | None:
        """The engine process; None before it was started."""
        if self.engine_pid is None or self.engine_start_ticks is None:
            return None
        return identity.ProcessIdentity(
            identity.boot_id(), self.engine_pid, self.pid_namespace, self.engine_start_ticks
        )


class LedgerReading(Value):
    """What the keeper found out about one device, for `put_devices`."""

    __slots__ = ("at_s", "device_id", "foreign_bytes", "observed", "residual_bytes")
    device_id: str
    """Which device."""
    at_s: float
    """`time.monotonic()` when the driver was asked, before the rows were looked up."""
    foreign_bytes: int
    """In use by processes without a lease."""
    residual_bytes: int
    """In use by a holder beyond or after its leases."""
    observed: Mapping[str, int]
    """Lease id -> bytes its processes use; a lease that is missing here is not measured."""

    def __init__(
        self,
        device_id: str,
        at_s: float,
        foreign_bytes: int = 0,
        residual_bytes: int = 0,
        observed: Mapping[str, int] | None = None,
    ) -> None:
        self._fill(device_id=device_id, at_s=at_s, foreign_bytes=foreign_bytes, residual_bytes=residual_bytes)
        self._fill(observed=dict(observed or {}))


class DeviceRow(Value):
    """One device as the ledger sees it now."""

    __slots__ = (
        *("id", "kind", "name", "index", "measured"),
        *("total_bytes", "reserve_bytes", "foreign_bytes", "residual_bytes", "read_at_s"),
        *("claimed_bytes", "observed_bytes", "settling_bytes", "free_bytes"),
    )
    id: str
    """As in `Device`, like the next six."""
    kind: str
    name: str
    index: int
    measured: bool
    total_bytes: int
    reserve_bytes: int
    foreign_bytes: int
    """In use by processes without a lease, at the last reading."""
    residual_bytes: int
    """In use by holders beyond or after their leases, at the last reading."""
    read_at_s: float | None
    """`time.monotonic()` of the last reading; None before the first."""
    claimed_bytes: int
    """Sum of the rows' claims."""
    observed_bytes: int | None
    """Sum of what rows were seen to use; None where nothing was measured."""
    settling_bytes: int
    """What rows counted for that were removed since the last reading: nobody has seen yet that it came back."""
    free_bytes: int
    """Effective free; negative when more is in use than may be."""

    def __init__(
        self,
        id: str,  # noqa: A002 (the field's name in `Device`)
        kind: str,
        name: str,
        index: int,
        measured: int,
        total_bytes: int,
        reserve_bytes: int,
        foreign_bytes: int,
        residual_bytes: int,
        read_at_s: float | None,
        claimed_bytes: int,
        observed_bytes: int | None,
        settling_bytes: int,
        free_bytes: int,
    ) -> None:
        self._fill(id=id, kind=kind, name=name, index=index, measured=bool(measured))
        self._fill(total_bytes=total_bytes, reserve_bytes=reserve_bytes, foreign_bytes=foreign_bytes)
        self._fill(residual_bytes=residual_bytes, read_at_s=read_at_s, claimed_bytes=claimed_bytes)
        self._fill(observed_bytes=observed_bytes, settling_bytes=settling_bytes, free_bytes=free_bytes)
