"""What can be configured: every key of model-boss.yaml with its default, and nothing that does not work.

Made by `config_files.py` from the file, the environment and the command line; read by `app.py`, which builds
everything from it. Importing this module is cheap, for `serve` and every command begin with it.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
)

from gpuboss.devices import DEFAULT_RESERVE_BYTES, DeviceKind, DeviceSpec, check_specs, parse_devices
from gpuboss.errors import DeviceError
from gpuboss.leases import GRACE_S, LONGEST_GRACE_S
from gpuboss.priority import LOW
from inference.discovery import Sources, hugging_face_cache
from inference.external_spec import Call, Spec, pattern_of
from inference.manifest import Manifest
from inference.validation import Bytes, Flag, Name, Priority, Seconds, Whole

DEFAULT_PORT = 8210
LONGEST_WAIT_S = 86_400.0
"""A day: the most that makes sense for most of what waits here."""
LONGEST_RESIDENCY_S = 7 * 86_400.0
LONGEST_COOLDOWN_S = 3_600.0

_DECLARED = (DeviceKind.SIM, DeviceKind.CPU)


def _absolute(value: object, info: ValidationInfo) -> object:
    """Paths in a configuration file start at that file; `~` is the home folder."""
    if not isinstance(value, str | Path):
        return value
    if not str(value).strip() or "\0" in str(value):
        raise ValueError("must name a path")
    return (_base_of(info.context) / Path(value).expanduser()).absolute()


def _section(value: object) -> object:
    """A section whose keys are all commented out is an empty one."""
    return {} if value is None else value


def _base_of(context: object) -> Path:
    base = context.get("base") if isinstance(context, dict) else None
    return base if isinstance(base, Path) else Path.cwd()


ConfigPath = Annotated[Path, BeforeValidator(_absolute, json_schema_input_type=str)]
"""A path, relative to the file it stands in."""


class DeviceSetting(BaseModel):
    """A device that is declared instead of found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=64, description="Its name; `cpu` for this host's memory.")
    kind: Literal["sim", "cpu"] = Field(description="`sim` plays a bigger machine; `cpu` is this host's memory.")
    vram: Bytes = Field(gt=0, description='Memory that may be leased, such as "8GiB".')

    @field_validator("kind", mode="before")
    @classmethod
    def _check_kind(cls, kind: object) -> object:
        if kind in (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.METAL):
            raise ValueError(f"devices of kind {kind} are found, not declared; leave devices out to use them")
        if kind not in _DECLARED:
            raise ValueError(f"unknown device kind {kind!r}; declared devices are of kind sim or cpu")
        return kind


class QueueSettings(BaseModel):
    """How requests wait."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_waiting: Whole = Field(default=512, ge=1, description="Requests that may wait; more are refused with 429.")
    max_wait_s: Seconds = Field(default=300.0, gt=0, description="How long a request waits before it gets a 503.")
    max_overtakes: Whole = Field(
        default=16, ge=0, description="How many requests for a loaded model may overtake one that waits for a load."
    )
    max_overtaken_s: Seconds = Field(
        default=20.0,
        ge=0,
        description="How long they may do so; as long may a model that was just loaded serve who waited for that.",
    )
    aging_s: Seconds = Field(
        default=60.0,
        ge=0.001,
        description="After this long, the oldest waiting request rises a class, and an idle model falls one: "
        "it is kept from less important requests by the class it last served.",
    )
    load_grace_s: Seconds = Field(
        default=10.0,
        ge=0,
        le=LONGEST_WAIT_S,
        description="How long a load goes on when all who waited for it left and others want its memory.",
    )
    keep_place_s: Seconds = Field(
        default=120.0,
        ge=0,
        le=LONGEST_WAIT_S,
        description="How long the place of a request that timed out or left is kept for the same client and model.",
    )
    client_cooldown_s: Seconds = Field(
        default=0.0,
        ge=0,
        le=LONGEST_COOLDOWN_S,
        description="How long a client's requests wait after one of theirs is done; only for clients that say who "
        "they are, and `x_cooldown_s` in a request wins.",
    )


class EngineSettings(BaseModel):
    """Programs that run models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    llama_server: ConfigPath | None = Field(
        default=None, description="The llama-server to use; found on PATH or in the cache when left out."
    )


class ExternalSetting(BaseModel):
    """A program that Model Boss does not start, such as ComfyUI."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name = Field(description="Its name in the ledger.")
    match: str = Field(
        min_length=1,
        max_length=1000,
        description="A part of its command line, arguments joined by spaces; between two slashes a regular expression.",
    )
    vram: Bytes = Field(gt=0, description="Memory it needs while it works.")
    priority: Priority = Field(
        default=LOW,
        description="urgent, high, normal, low, batch, or 0 to 1000. What is more important has its memory when it is "
        "idle, or when `preempt_grace_s` is over.",
    )
    device: str | None = Field(
        default=None, description="Device it uses; when left out, where it is seen to, else what suits best."
    )
    busy_url: str | None = Field(
        default=None,
        description="GET of this tells whether it works: JSON with a true, a number above 0 or a list with something "
        "in it, anywhere. When left out, it is taken to be idle.",
    )
    free: str | None = Field(
        default=None,
        description='Request that makes it free its memory, as "POST http://127.0.0.1:8188/free" and, after that, a '
        "JSON body. When left out, it is never asked to.",
    )

    @field_validator("match")
    @classmethod
    def _check_match(cls, match: str) -> str:
        pattern_of(match)
        return match

    @field_validator("busy_url", "free")
    @classmethod
    def _check_call(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None:
            Call.parse(text, default_method="GET" if info.field_name == "busy_url" else "POST")
        return text


class Settings(BaseModel):
    """The whole configuration. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: Whole = Field(default=DEFAULT_PORT, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    default_model: str | None = Field(default=None, description="Model for requests that name none.")
    models_dirs: tuple[ConfigPath, ...] = Field(
        default=(), description="Folders searched in depth for GGUF files; each is servable without a manifest."
    )
    scan_hf_cache: Flag = Field(default=True, description="Search the Hugging Face cache as well.")
    manifests: ConfigPath = Field(
        default=Path("manifests"), description="Folder of manifests, one YAML file per model that needs one."
    )
    state_dir: ConfigPath | None = Field(
        default=None, description="Where leases and logs are kept; the user's state folder when left out."
    )
    store: str | None = Field(
        default=None,
        description="A Redis or Valkey for leases: redis://, rediss:// or unix://; a private one when left out.",
    )
    devices: tuple[DeviceSetting, ...] | None = Field(
        default=None, description="Devices to use instead of those that are found."
    )
    reserve: Bytes = Field(
        default=DEFAULT_RESERVE_BYTES, description="Memory of each found device that nobody may lease."
    )
    queue: Annotated[QueueSettings, BeforeValidator(_section)] = Field(
        default_factory=QueueSettings, description="How requests wait."
    )
    engines: Annotated[EngineSettings, BeforeValidator(_section)] = Field(
        default_factory=EngineSettings, description="Programs that run models."
    )
    min_residency_s: Seconds | None = Field(
        default=None,
        ge=0,
        le=LONGEST_RESIDENCY_S,
        description="How long a model that has just been loaded is safe from equally important ones; three times what "
        "its load took when left out.",
    )
    stall_s: Seconds = Field(
        default=60.0,
        ge=1,
        le=LONGEST_WAIT_S,
        description="An engine that has work and makes no progress for so long is ended.",
    )
    on_restart: Literal["adopt", "reap"] = Field(
        default="adopt",
        description="What becomes of loaded models when the broker dies: `adopt` leaves them to the next one, `reap` "
        "ends them.",
    )
    orphan_grace_s: Seconds = Field(
        default=30.0,
        ge=0,
        le=LONGEST_WAIT_S,
        description="How long a loaded model waits for the next broker with `on_restart: adopt`.",
    )
    shutdown_s: Seconds = Field(
        default=10.0,
        ge=0,
        le=LONGEST_WAIT_S,
        description="How long requests that run may go on when the broker is told to end.",
    )
    preempt_grace_s: Seconds = Field(
        default=GRACE_S,
        ge=0,
        le=LONGEST_GRACE_S,
        description="When something more important needs a model's memory, requests that run may go on for so long.",
    )
    external: tuple[ExternalSetting, ...] = Field(
        default=(), description="Programs beside Model Boss that use the same devices, such as ComfyUI."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Names, besides this machine's loopback, that keyless requests may address."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What is logged.")
    api_key: str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="The key callers must send; from MODEL_BOSS_API_KEY alone, never from a file.",
    )

    _base: Path = PrivateAttr(default_factory=Path.cwd)

    def model_post_init(self, context: Any, /) -> None:
        """Remember where the default for `manifests` starts."""
        self._base = _base_of(context)

    @field_validator("devices", mode="before")
    @classmethod
    def _read_devices(cls, devices: object) -> object:
        if not isinstance(devices, str):
            return devices
        try:
            specs = parse_devices(devices)
        except DeviceError as error:
            raise ValueError(error.message) from error
        return [{"id": spec.id, "kind": spec.kind.value, "vram": spec.total_bytes} for spec in specs]

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: tuple[DeviceSetting, ...] | None) -> tuple[DeviceSetting, ...] | None:
        try:
            if devices is not None:
                check_specs(_specs(devices))
        except DeviceError as error:
            raise ValueError(error.message) from error
        return devices

    @field_validator("external")
    @classmethod
    def _check_external(cls, external: tuple[ExternalSetting, ...]) -> tuple[ExternalSetting, ...]:
        names = [one.name for one in external]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two programs are called {name!r}; their leases are told apart by it")
        return external

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: str | None) -> str | None:
        if store is not None and not store.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(
                f"{store!r} is not an address like redis://host:6379/0, rediss://host or unix:///path/to.sock"
            )
        return store

    @property
    def reserve_bytes(self) -> int:
        """`reserve`, in bytes."""
        return self.reserve

    @property
    def manifests_dir(self) -> Path:
        """The folder of manifests, absolute; it need not exist."""
        return (self._base / self.manifests).absolute()

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def device_specs(self) -> tuple[DeviceSpec, ...] | None:
        """The declared devices as the ledger takes them; None when they are to be found."""
        return _specs(self.devices) if self.devices is not None else None

    def external_specs(self) -> tuple[Spec, ...]:
        """The programs beside us, as `inference` takes them."""
        return tuple(
            Spec(
                name=one.name,
                match=one.match,
                vram_bytes=one.vram,
                priority=one.priority,
                busy=Call.parse(one.busy_url, default_method="GET") if one.busy_url else None,
                free=Call.parse(one.free, default_method="POST") if one.free else None,
                device=one.device,
                grace_s=self.preempt_grace_s,
            )
            for one in self.external
        )

    def model_sources(self) -> Sources:
        """Where the registry looks for models."""
        return Sources(
            models_dirs=self.models_dirs,
            hugging_face_cache=hugging_face_cache(os.environ) if self.scan_hf_cache else None,
            manifests=self.manifests_dir,
            manifests_expected="manifests" in self.model_fields_set,
            default_model=self.default_model,
        )


def settings_schema() -> dict[str, Any]:
    """JSON schema of model-boss.yaml, for editors; without what never stands in the file."""
    schema = Settings.model_json_schema(mode="validation")
    del schema["properties"]["api_key"]
    for name in ("queue", "engines"):  # pydantic leaves a section's description to its definition
        schema["properties"][name]["description"] = Settings.model_fields[name].description
    schema["title"] = "model-boss.yaml"
    return schema


def manifest_schema() -> dict[str, Any]:
    """JSON schema of a manifest, for editors."""
    return Manifest.model_json_schema(mode="validation") | {"title": "manifest"}


def _specs(devices: tuple[DeviceSetting, ...]) -> tuple[DeviceSpec, ...]:
    return tuple(DeviceSpec(device.id, DeviceKind(device.kind), device.vram) for device in devices)
