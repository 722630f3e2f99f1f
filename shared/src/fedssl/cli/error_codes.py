"""Which exit code an error leads to. Importing this imports the client, so it is imported only after an error."""

from collections.abc import Mapping

from fedssl.cli.errors import (
    ChecksFailed,
    EvaluationNotCompleted,
    NoSuchJob,
    NoSuchRun,
    NoToken,
    RunNotCompleted,
    RunPaused,
    RunStopped,
    UsageError,
    WaitedTooLong,
)
from fedssl.cli.exit_codes import CONFLICT, FAILED, NOT_ALLOWED, PAUSED, STOPPED, TIMED_OUT, UNREACHABLE, USAGE
from fedssl.client import (
    ApiError,
    BadAnswer,
    ClientError,
    Conflict,
    Gone,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    Rejected,
    RunNotFinished,
    Unavailable,
    Unreachable,
    Untrusted,
)
from fedssl.errors import DataError, DeviceError, ExportError, FedSSLError, FolderInUseError, ResultsError, SpecError

CODES: Mapping[type[FedSSLError], int] = {
    SpecError: USAGE,
    DataError: USAGE,
    DeviceError: USAGE,
    ExportError: USAGE,
    ResultsError: CONFLICT,
    FolderInUseError: CONFLICT,
    ClientError: USAGE,  # the class itself: an invalid address or token
    Unreachable: UNREACHABLE,
    Untrusted: UNREACHABLE,
    BadAnswer: UNREACHABLE,
    Unavailable: UNREACHABLE,
    ApiError: FAILED,
    NotAuthenticated: NOT_ALLOWED,
    NotAllowed: NOT_ALLOWED,
    NotFound: CONFLICT,
    Conflict: CONFLICT,
    Gone: CONFLICT,
    Rejected: USAGE,
    RunNotFinished: TIMED_OUT,
    UsageError: USAGE,
    NoToken: NOT_ALLOWED,
    NoSuchRun: CONFLICT,
    NoSuchJob: CONFLICT,
    RunNotCompleted: FAILED,
    RunStopped: STOPPED,
    RunPaused: PAUSED,
    WaitedTooLong: TIMED_OUT,
    ChecksFailed: FAILED,
    EvaluationNotCompleted: FAILED,
}


def exit_code(error: FedSSLError) -> int:
    """Return the code of the most specific class of the error that has one, or FAILED.

    >>> exit_code(UsageError("give a run"))
    2
    """
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), FAILED)
