"""`/api/v1/leases`: device memory for programs in any language. Called through FastAPI; calls `lease_desk.py`."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from coordinator.api import views
from coordinator.broker import Broker
from coordinator.errors import TABLE, BadJson, BadRequest, LeaseDiffers, LeaseElsewhere, LeaseOver, LeaseUnknown
from coordinator.hangup import HangUp
from coordinator.lease_desk import DEFAULT_TTL_S, LeaseWish
from coordinator.security import is_local
from gpuboss.errors import ActivationRefused, LeaseRefused, StoreUnavailable
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import GRACE_S, LONGEST_GRACE_S, LONGEST_TTL_S, Snapshot
from gpuboss.priority import NORMAL
from inference import external_process
from inference.validation import Bytes, Flag, Name, Priority, Seconds, Whole

PATH = "/api/v1/leases"
LONGEST_WAIT_S = 300.0
"""Of one request; a caller who wants to wait longer comes back with its request_id."""
SHORTEST_TTL_S = 2.0
RETRY_AFTER_S = 1
"""For a caller whose wait is over: the place in the queue is kept, so asking again at once costs nobody anything."""
_MIB = 1 << 20


class LeaseAsk(BaseModel):
    """What is asked for. One of `vram`, `vram_mb` and `exclusive` says how much of each device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vram: Annotated[Bytes | None, Field(gt=0, description='Memory of each device: "20GiB", or bytes.')] = None
    vram_mb: Annotated[Whole | None, Field(gt=0, description="The same in MiB.")] = None
    exclusive: Flag = Field(default=False, description="All memory of each device.")
    gpus: Whole = Field(default=1, ge=1, le=64, description="On so many devices, all of them or none.")
    devices: tuple[str, ...] | None = Field(
        default=None, min_length=1, max_length=64, description="Devices to choose from, by id, or gpu0, gpu1 by index."
    )
    priority: Priority = Field(
        default=NORMAL, description="urgent, high, normal, low, batch, or 0 (most important) to 1000."
    )
    preemptible: Flag = Field(
        default=False,
        description="Something more important may have it: `notice` in later answers says so, and when `grace_s` is "
        "over the lease ends. Not with a process.",
    )
    grace_s: Seconds = Field(default=GRACE_S, ge=0, le=LONGEST_GRACE_S, description="From that notice to the end.")
    name: Name = Field(default="http", description="Shown to people.")
    pid: Whole | None = Field(
        default=None,
        ge=1,
        description="The process of this host that uses the memory: the lease is freed when it dies. Without a process "
        "the lease is held by word, and must be renewed within `ttl_s`.",
    )
    match: str | None = Field(
        default=None,
        max_length=1000,
        pattern=r"[^\s]",
        description="The same by a part of its command line; of several processes the one that started first.",
    )
    container: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{12,64}$",
        description="The same by the id of the container it runs in (`docker inspect -f '{{.Id}}' NAME`): the "
        "container's first process.",
    )
    ttl_s: Seconds | None = Field(
        default=None,
        ge=SHORTEST_TTL_S,
        le=LONGEST_TTL_S,
        description=f"Without a process: freed when it was not renewed for so long. {DEFAULT_TTL_S:.0f} by default.",
    )
    wait_s: Seconds = Field(
        default=0.0, ge=0, le=LONGEST_WAIT_S, description="Wait so long for the grant before the answer is 202."
    )
    request_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$",
        description="Your own name for this request, never used before. Asked again with it, you go on waiting in your "
        "place, for what you ask for now; without it, hanging up leaves the queue.",
    )

    @model_validator(mode="after")
    def _check(self) -> LeaseAsk:
        if sum([self.vram is not None, self.vram_mb is not None, self.exclusive]) != 1:
            raise ValueError('say how much: one of vram (such as "20GiB"), vram_mb, and exclusive')
        by = self.process_named_by
        if len(by) > 1:
            raise ValueError(f"say which process by one of {', '.join(by)}")
        if by and self.ttl_s is not None:
            raise ValueError(f"a lease with a {by[0]} ends with its process; leave ttl_s out")
        if by and self.preemptible:
            raise ValueError(
                f"a lease with a {by[0]} cannot be preemptible: nobody would end its process when the grace is over. "
                f"Leave the {by[0]} out and renew the lease, or run the program by `gpuboss run --preemptible`"
            )
        return self

    @property
    def process_named_by(self) -> list[str]:
        """The field that names the process; none where the lease is held by word."""
        return [name for name in ("pid", "match", "container") if getattr(self, name) is not None]

    def wish(self, process: ProcessIdentity | None) -> LeaseWish:
        """The same for the desk."""
        by_word = process is None
        return LeaseWish(
            vram_bytes=self.vram if self.vram_mb is None else self.vram_mb * _MIB,
            gpus=self.gpus,
            only=self.devices,
            priority=self.priority,
            preemptible=self.preemptible,
            grace_s=self.grace_s,
            name=self.name,
            process=process,
            ttl_s=(self.ttl_s or DEFAULT_TTL_S) if by_word else None,
            request_id=self.request_id,
            wait_s=self.wait_s,
        )


_EXAMPLES: Any = {
    "by word": {
        "summary": "20 GiB for a program elsewhere, which renews it",
        "value": {"vram": "20GiB", "name": "sft-12", "wait_s": 60, "request_id": "sft-12-run-1", "ttl_s": 60},
    },
    "a process": {
        "summary": "Two whole GPUs for a process of this host",
        "value": {"exclusive": True, "gpus": 2, "name": "render", "priority": "batch", "pid": 4711},
    },
    "a running program": {
        "summary": "A program that runs already, named by its command line",
        "value": {"vram": "12GiB", "name": "comfyui", "match": "ComfyUI/main.py", "wait_s": 30},
    },
    "preemptible": {
        "summary": "In MiB, and something more important may have it",
        "value": {"vram_mb": 8192, "priority": "low", "preemptible": True, "grace_s": 60},
    },
}
_HELD = {
    "id": "http-sft-12-run-1",
    "request_id": "sft-12-run-1",
    "holder": "job:sft-12",
    "kind": "job",
    "state": "active",
    "priority": "normal",
    "devices": {"GPU-6f2a": 21474836480},
    "env": {"CUDA_VISIBLE_DEVICES": "GPU-6f2a", "GPUBOSS_LEASE": "http-sft-12-run-1"},
    "preemptible": False,
    "grace_s": 30.0,
    "ttl_s": 60.0,
    "position": None,
    "notice": None,
    "reason": "",
}
_QUEUED = _HELD | {"state": "queued", "devices": {}, "env": {}, "position": 2}
_WAITS = {
    "holders": [{"holder": "job:render", "bytes": 21474836480}],
    "free_bytes": {"GPU-6f2a": 2147483648},
    "retry_after_s": RETRY_AFTER_S,
}


def _shown(description: str, example: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"example": example}}}


def _errors(*classes: type[Exception]) -> dict[int | str, dict[str, Any]]:
    """What may go wrong, by status, as the one table of errors has it: each code with the sentence of its class."""
    told: dict[int, list[str]] = {}
    for cls in (*classes, StoreUnavailable):
        sentence = (cls.__doc__ or "").partition("\n")[0]
        told.setdefault(TABLE[cls].status, []).append(f"`{TABLE[cls].code}`: {sentence}")
    shown: dict[int | str, dict[str, Any]] = {
        status: {"description": " ".join(lines)} for status, lines in sorted(told.items())
    }
    return shown | {"default": {"description": '`{"error": {"message", "type", "code", "param"}}`'}}


def routes(broker: Broker) -> APIRouter:
    """The lease endpoints."""
    router = APIRouter(prefix=PATH, tags=["leases"])

    @router.post(
        "",
        responses={
            200: _shown("Held: the memory may be used", _HELD),
            202: _shown("Queued; ask again with the same request_id to go on waiting", _QUEUED | _WAITS),
            **_errors(BadRequest, BadJson, LeaseRefused, LeaseDiffers, LeaseOver, ActivationRefused),
        },
    )
    async def acquire(ask: Annotated[LeaseAsk, Body(openapi_examples=_EXAMPLES)], request: Request) -> JSONResponse:
        """Ask for device memory. 200: it is yours. 202: it is queued.

        It is yours until you DELETE it, its process (`pid`, `match`, `container`) dies, or it was not renewed for
        `ttl_s`. Set `env` in the environment of the program before it touches a device.
        """
        wish = ask.wish(await _process(ask, request))
        with HangUp(request.receive):
            standing = await broker.desk.ask(wish)
        body = views.lease(standing.lease, broker.desk.devices)
        if standing.held:
            return JSONResponse(body)
        body |= _what_it_waits_for(wish, await broker.desk.snapshot())
        return JSONResponse(body, status_code=202, headers={"retry-after": str(RETRY_AFTER_S)})

    listing = {"description": "All leases of this host, holders first, then waiters in order"}

    @router.get("", responses={200: listing, **_errors()})
    async def listed() -> dict[str, Any]:
        """Every lease of this host: models, jobs, services and waiters."""
        snapshot = await broker.desk.snapshot()
        return {"leases": [views.lease(lease, broker.desk.devices) for lease in snapshot.leases]}

    @router.get("/{lease_id}", responses={200: _shown("The lease", _HELD), **_errors(LeaseUnknown)})
    async def one(lease_id: str) -> dict[str, Any]:
        """One lease as it stands; one that ended can be seen for ten minutes."""
        return views.lease(await broker.desk.find(lease_id), broker.desk.devices)

    renewed = _shown("The lease, with all its time before it", _HELD)

    @router.post("/{lease_id}/renew", responses={200: renewed, **_errors(LeaseUnknown, LeaseElsewhere, LeaseOver)})
    async def renew(lease_id: str) -> dict[str, Any]:
        """Say that you still use it. `notice` in the answer says when something more important wants it."""
        return views.lease(await broker.desk.renew(lease_id), broker.desk.devices)

    ended = _shown("The lease, ended", _HELD | {"state": "freed"})

    @router.delete("/{lease_id}", responses={200: ended, **_errors(LeaseUnknown, LeaseElsewhere)})
    async def give_back(lease_id: str) -> dict[str, Any]:
        """Give it back, or leave the queue. Stop using the memory first: from now on it may be somebody else's."""
        return views.lease(await broker.desk.give_back(lease_id), broker.desk.devices)

    return router


async def _process(ask: LeaseAsk, request: Request) -> ProcessIdentity | None:
    """The process that is named, which must be one of this host.

    Raises:
        BadRequest
    """
    if not ask.process_named_by:
        return None
    [name] = ask.process_named_by
    value = getattr(ask, name)
    if not is_local(request.scope):
        raise BadRequest(
            f"{name} {value} would be a process of the broker's host, and this request came from another one: leave "
            f"{name} out and renew the lease",
            param=name,
        )
    process = await asyncio.to_thread(_seen, ask)
    if process is None:
        raise BadRequest(f"{name} {value} is no process that the broker can see on its host", param=name)
    return process


def _seen(ask: LeaseAsk) -> ProcessIdentity | None:
    if ask.match is not None:
        # A caller's own command line may hold what it asks for, as that of curl does.
        return external_process.find(re.compile(re.escape(ask.match)), but=PATH)
    if ask.container is not None:
        return external_process.find_in_container(ask.container)
    try:
        return ProcessIdentity.of(ask.pid or 0)
    except ProcessLookupError:
        return None


def _what_it_waits_for(wish: LeaseWish, snapshot: Snapshot) -> dict[str, Any]:
    """Who holds what of the devices it could be granted on."""
    options = wish.options([use.device for use in snapshot.devices], snapshot)
    candidates = {device for option in options for device in option}
    held: list[dict[str, Any]] = [
        {"holder": other.holder, "bytes": size}
        for other in snapshot.leases
        if (size := sum(share for device, share in other.shares.items() if device in candidates))
    ]
    uses = [use for use in snapshot.devices if use.device.id in candidates]
    foreign = sum(use.foreign_bytes for use in uses)
    held += [{"holder": "programs without a lease", "bytes": foreign}] if foreign else []
    return {
        "holders": sorted(held, key=lambda one: -one["bytes"]),
        "free_bytes": {use.device.id: use.free_bytes for use in uses},
        "retry_after_s": RETRY_AFTER_S,
    }
