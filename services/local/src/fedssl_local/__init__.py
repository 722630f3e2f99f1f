"""A federation's processes on one machine: Postgres and Valkey from wheels, and a supervisor for all of them.

The package needs Linux or macOS. It starts the coordinator and the worker as programs, and imports neither.
"""

from fedssl_local.errors import (
    CrashLoopError,
    FolderInUseError,
    GivenUpError,
    LocalError,
    MissingServerError,
    PortTakenError,
    ServerFailedError,
    ServiceFailedError,
    UnprivilegedError,
)
from fedssl_local.postgres import Postgres
from fedssl_local.server import Server
from fedssl_local.service import Service
from fedssl_local.supervisor import RestartPolicy, Supervisor
from fedssl_local.valkey import Valkey

__all__ = [
    "CrashLoopError",
    "FolderInUseError",
    "GivenUpError",
    "LocalError",
    "MissingServerError",
    "PortTakenError",
    "Postgres",
    "RestartPolicy",
    "Server",
    "ServerFailedError",
    "Service",
    "ServiceFailedError",
    "Supervisor",
    "UnprivilegedError",
    "Valkey",
]
