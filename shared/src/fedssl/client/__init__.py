"""Typed Python clients of the REST API: `Client` for operators, `WorkerClient` for the process of a data owner.

Both are synchronous, may be shared between threads and are closed by their `with` block:

    with Client("http://127.0.0.1:8000", token) as client:
        run = client.create_run(spec)
        for event in client.events(run.id):
            print(event.message)

What cannot be reached is tried again, for as long as `Retry` says; what the coordinator refuses raises an `ApiError`.
"""

from fedssl.client.errors import (
    ApiError,
    BadAnswer,
    ClientError,
    Conflict,
    DuplicateUpdate,
    Gone,
    LeaseLost,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    Rejected,
    ServerError,
    TooManyRequests,
    TryAgain,
    Unavailable,
    UnknownWork,
    Unreachable,
    Untrusted,
)
from fedssl.client.operator import Client
from fedssl.client.retry import Retry
from fedssl.client.tls import Tls
from fedssl.client.worker import WorkerClient

__all__ = [
    "ApiError",
    "BadAnswer",
    "Client",
    "ClientError",
    "Conflict",
    "DuplicateUpdate",
    "Gone",
    "LeaseLost",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "Rejected",
    "Retry",
    "ServerError",
    "Tls",
    "TooManyRequests",
    "TryAgain",
    "Unavailable",
    "UnknownWork",
    "Unreachable",
    "Untrusted",
    "WorkerClient",
]
