from .errors import (
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
from .operator import Client
from .retry import Retry
from .tls import Tls
from .worker import WorkerClient

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
