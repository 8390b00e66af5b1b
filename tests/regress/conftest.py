"""The server of the fault tests."""

from __future__ import annotations

from tests.faults.conftest import fault_server, fault_socket

__all__ = ["fault_server", "fault_socket"]
