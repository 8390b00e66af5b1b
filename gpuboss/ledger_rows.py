"""The values that go into and come out of the node ledger.

Built by the shim and the client (`LedgerRow`) and the keeper (`LedgerReading`, from what `Prior` says of before), read
back by them and by the command line (`DeviceRow`). What an admission rested on (`Ground`) is shown with its lease.
"""

from __future__ import annotations

import time

from gpuboss import identity
from gpuboss.light import Value
from gpuboss.units import format_bytes

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
        "terms",
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
    pid: int | None
    """The holding process: the shim, or the job itself. None for a lease that is held by word alone."""
    start_ticks: int | None
    """Its start time, as in `ProcessIdentity`."""
    pid_namespace: int | None
    """The namespace in which `pid` and `engine_pid` are numbers."""
    engine_pid: int | None
    """The engine the holder started; None before that."""
    engine_start_ticks: int | None
    """The engine's start time; None before it was started."""
    since_s: float
    """Wall clock, seconds since 1970, when the row was made."""
    terms: str
    """What else belongs to the lease, as JSON text (`lease_wire.terms_for`); the books keep it and do not read it.
    Empty: the lease's kind is in the holder's name and the rest is as usual."""

    def __init__(
        self,
        lease_id: str,
        epoch: int,
        seq: int,
        holder: str,
        shares: Mapping[str, int],
        pid: int | None = None,
        start_ticks: int | None = None,
        pid_namespace: int | None = None,
        engine_pid: int | None = None,
        engine_start_ticks: int | None = None,
        since_s: float | None = None,
        terms: str = "",
    ) -> None:
        """ValueError when a process is named by half."""
        if len({part is None for part in (pid, start_ticks, pid_namespace)}) != 1:
            raise ValueError(f"lease {lease_id}: a process is pid, start time and namespace together, or none of them")
        self._fill(lease_id=lease_id, epoch=epoch, seq=seq, holder=holder, shares=dict(shares))
        self._fill(pid=pid, start_ticks=start_ticks, pid_namespace=pid_namespace)
        self._fill(engine_pid=engine_pid, engine_start_ticks=engine_start_ticks)
        self._fill(since_s=time.time() if since_s is None else since_s, terms=terms)

    @property
    def process(self) -> identity.ProcessIdentity | None:
        """The holding process, None when it is held by word. The file is of this boot, so the row's process is too."""
        if self.pid is None or self.start_ticks is None or self.pid_namespace is None:
            return None
        return identity.ProcessIdentity(identity.boot_id(), self.pid, self.pid_namespace, self.start_ticks)

    @property
    def engine(self) -> identity.ProcessIdentity | None:
        """The engine process; None before it was started."""
        if self.engine_pid is None or self.engine_start_ticks is None or self.pid_namespace is None:
            return None
        return identity.ProcessIdentity(
            identity.boot_id(), self.engine_pid, self.pid_namespace, self.engine_start_ticks
        )


class LedgerReading(Value):
    """What the keeper found out about one device, for `put_devices`."""

    __slots__ = (
        *("at_s", "base_bytes", "device_id", "foreign_bytes", "observed", "paid", "per_process"),
        *("quarantined_bytes", "residual_bytes"),
    )
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
    quarantined_bytes: int
    """The part of the residual bytes that ended holders had and the driver does not give back."""
    base_bytes: int
    """What the next holder's end is measured from; see `Prior`."""
    per_process: bool
    """Whether the driver gave figures per process."""
    paid: tuple[int, ...]
    """Ids of the debts that the driver has given back."""

    def __init__(
        self,
        device_id: str,
        at_s: float,
        foreign_bytes: int = 0,
        residual_bytes: int = 0,
        observed: Mapping[str, int] | None = None,
        *,
        quarantined_bytes: int = 0,
        base_bytes: int = 0,
        per_process: bool = True,
        paid: tuple[int, ...] = (),
    ) -> None:
        self._fill(device_id=device_id, at_s=at_s, foreign_bytes=foreign_bytes, residual_bytes=residual_bytes)
        self._fill(observed=dict(observed or {}), quarantined_bytes=quarantined_bytes, base_bytes=base_bytes)
        self._fill(per_process=per_process, paid=paid)


class Debt(Value):
    """What an ended holder used of a device, until its driver was seen to have it back."""

    __slots__ = ("bytes", "floor_bytes", "holder", "id", "since_s")
    id: int
    holder: str
    """Shown to people."""
    bytes: int
    """The most it was seen to use; what it claimed where it was never seen."""
    floor_bytes: int
    """The device's base when the holder ended: use below that is none of this debt."""
    since_s: float
    """`time.monotonic()` when its row was removed."""

    def __init__(self, id: int, holder: str, bytes: int, floor_bytes: int, since_s: float) -> None:  # noqa: A002
        self._fill(id=id, holder=holder, bytes=bytes, floor_bytes=floor_bytes, since_s=since_s)


class Prior(Value):
    """What is known of a device from before a reading, which the reading must be explained with."""

    __slots__ = ("base_bytes", "debts", "foreign_bytes", "new", "observed", "per_process")
    foreign_bytes: int
    """In use by processes without a lease, at the last reading."""
    base_bytes: int
    """With figures per process: what no living process accounts for, such as the driver's own. Without them: foreign
    use when nobody was loading."""
    per_process: bool | None
    """Whether the last reading had figures per process; None before the first."""
    observed: Mapping[str, int]
    """Lease id -> bytes that it was seen to use at the last reading."""
    new: tuple[str, ...]
    """Leases that were admitted after the last reading."""
    debts: tuple[Debt, ...]
    """Of ended holders, oldest first."""

    def __init__(
        self,
        foreign_bytes: int = 0,
        base_bytes: int = 0,
        per_process: bool | None = None,
        observed: Mapping[str, int] | None = None,
        new: tuple[str, ...] = (),
        debts: tuple[Debt, ...] = (),
    ) -> None:
        self._fill(foreign_bytes=foreign_bytes, base_bytes=base_bytes, per_process=per_process)
        self._fill(observed=dict(observed or {}), new=new, debts=debts)


class Ground(Value):
    """What the admission of a holder to one device rested on."""

    __slots__ = ("after", "after_age_s", "device_id", "free_bytes", "read_age_s")
    device_id: str
    free_bytes: int
    """Effective free before. What an ended holder had is in it only if a reading since then shows it back."""
    read_age_s: float | None
    """How old the device's last reading was then; None where nothing measures it."""
    after: str
    """The holder that ended last on the device before that; empty for none."""
    after_age_s: float | None
    """How long before."""

    def __init__(
        self,
        device_id: str,
        free_bytes: int,
        read_age_s: float | None,
        after: str = "",
        after_age_s: float | None = None,
    ) -> None:
        self._fill(device_id=device_id, free_bytes=free_bytes, read_age_s=read_age_s)
        self._fill(after=after, after_age_s=after_age_s)

    @property
    def is_read_since(self) -> bool:
        """Whether the device was read after the last holder before this one had ended."""
        return self.read_age_s is not None and self.after_age_s is not None and self.read_age_s < self.after_age_s

    @property
    def words(self) -> str:
        """For people: "cpu 11.2GiB free, read 0.04 s before, slot:robin ended 0.06 s before"."""
        read = "not measured" if self.read_age_s is None else f"read {self.read_age_s:.2f} s before"
        ended = "" if self.after_age_s is None else f", {self.after} ended {self.after_age_s:.2f} s before"
        return f"{self.device_id} {format_bytes(self.free_bytes)} free, {read}{ended}"


class SharePeak(Value):
    """The most that a living holder was seen to use of one device."""

    __slots__ = ("bytes", "device_id", "read_at_s")
    device_id: str
    bytes: int
    read_at_s: float
    """`time.monotonic()` of the device's last reading, which saw the holder."""

    def __init__(self, device_id: str, bytes: int, read_at_s: float) -> None:  # noqa: A002 (as in `Debt`)
        self._fill(device_id=device_id, bytes=bytes, read_at_s=read_at_s)


class DeviceRow(Value):
    """One device as the ledger sees it now."""

    __slots__ = (
        *("id", "kind", "name", "index", "measured"),
        *("total_bytes", "reserve_bytes", "foreign_bytes", "residual_bytes", "quarantined_bytes", "read_at_s"),
        *("per_process", "claimed_bytes", "observed_bytes", "settling_bytes", "free_bytes"),
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
    quarantined_bytes: int
    """The part of the residual bytes that ended holders had and the driver does not give back."""
    read_at_s: float | None
    """`time.monotonic()` of the last reading; None before the first."""
    per_process: bool
    """Whether the last reading had figures per process."""
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
        quarantined_bytes: int,
        read_at_s: float | None,
        per_process: int,
        claimed_bytes: int,
        observed_bytes: int | None,
        settling_bytes: int,
        free_bytes: int,
    ) -> None:
        self._fill(id=id, kind=kind, name=name, index=index, measured=bool(measured))
        self._fill(total_bytes=total_bytes, reserve_bytes=reserve_bytes, foreign_bytes=foreign_bytes)
        self._fill(residual_bytes=residual_bytes, quarantined_bytes=quarantined_bytes, read_at_s=read_at_s)
        self._fill(per_process=bool(per_process), claimed_bytes=claimed_bytes, observed_bytes=observed_bytes)
        self._fill(settling_bytes=settling_bytes, free_bytes=free_bytes)
