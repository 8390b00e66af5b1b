"""The engines Model Boss can run: one module per engine, each a `Backend`; the registry is the literal dict below.

Called by `registry.py` (may a manifest say this?), `engine_run.py` (how is it started, is it ready?) and the
coordinator (which paths does it answer itself?). What is peculiar to an engine stands in its module and nowhere else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from pydantic import BaseModel

from inference.backends import llama_server
from inference.backends.base import Command, Launch, Readiness, Routes
from inference.fault import Fault
from inference.model import Category, Model
from inference.process import Exited
from inference.proxy import EngineClient

__all__ = ["REGISTRY", "Backend", "Command", "Launch", "Readiness", "Routes"]


class Backend(Protocol):
    """What Model Boss needs to know of an engine. Adding one means to provide these and to pass tests/contract."""

    @property
    def name(self) -> str:
        """Its key in `REGISTRY` and in manifests."""

    @property
    def categories(self) -> frozenset[Category]:
        """What it can serve."""

    @property
    def options(self) -> type[BaseModel]:
        """What a manifest may say under `options:`; forbids unknown keys."""

    @property
    def routes(self) -> Routes:
        """The paths the engine answers itself, to which requests are passed as they are."""

    @property
    def stop_grace_s(self) -> float:
        """Between SIGTERM and SIGKILL when an idle engine is ended; 0: killed at once, for it holds nothing to save."""

    def check_args(self, extra_args: Sequence[str]) -> None:
        """ValueError, naming what to use instead, for an argument that is not the manifest's to set."""

    def command(self, model: Model, launch: Launch) -> Command:
        """Program, arguments and the whole environment. Pure but for a look at the model's file.

        Raises:
            inference.errors.ModelBroken: options or arguments that `registry.py` would have refused.
        """

    async def probe(self, engine: EngineClient) -> Readiness:
        """Ask a starting engine how far it is; one that does not listen yet is loading.

        Raises:
            inference.errors.LoadFailed: it answers, but will never be ready.
        """

    async def progress(self, engine: EngineClient) -> Hashable | None:
        """Ask a ready engine how far it is with the requests that it has; only asked while there are any.

        Something that differs from the last answer whenever a token of any of them was read or made in between, or
        whatever an engine counts that makes no tokens. None: it cannot tell, and is never taken for stalled. It may
        take as long as it likes: an answer that does not come in time counts as no progress.

        Raises:
            inference.errors.EngineDied: it does not answer.
        """

    def diagnose(self, ended: Exited, last_lines: Sequence[str]) -> Fault:
        """What was wrong with an engine that ended by itself, by how it ended and the last lines of its log. Pure.

        CRASH where nothing says otherwise, for that is tried again. BAD_ARGUMENTS and BAD_MODEL are not, until the
        model's definition changes, so they have to be certain. A kill by the system for want of memory is seen to
        elsewhere.
        """


REGISTRY: Mapping[str, Backend] = {
    "llama-server": llama_server.BACKEND,
}
"""Every backend by the name manifests use."""
