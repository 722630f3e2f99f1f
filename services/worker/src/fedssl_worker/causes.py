"""The reason that the coordinator receives for an error of this worker, without paths, and whose problem it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from fedssl.client import NotFound
from fedssl.errors import ArtifactError, DataError, FedSSLError, LibraryMissing, MethodError, SpecError
from fedssl.protocol.states import Cause
from fedssl_worker.data import names_a_path
from fedssl_worker.disclosure.policy import NotPermitted

log = structlog.get_logger()


class CannotTrain(FedSSLError):
    """This worker cannot do this work. The coordinator receives the message as the reason."""

    def __init__(self, message: str, cause: Cause = Cause.CLIENT_MACHINE) -> None:
        super().__init__(message)
        self.cause = cause


_ATTRIBUTE = "_fedssl_cause"
_CAUSES: dict[type[Exception], Cause] = {
    NotPermitted: Cause.CLIENT_DATA,
    DataError: Cause.CLIENT_DATA,
    LibraryMissing: Cause.CLIENT_MACHINE,  # before SpecError, its base class
    SpecError: Cause.SPEC,
    MethodError: Cause.SPEC,
}


def reason_of(error: FedSSLError) -> str:
    """Return an error's message for the coordinator, which must not learn paths on this machine. The log has them."""
    if not names_a_path(error):
        return str(error)
    log.error("work.impossible", reason=str(error))
    return f"this worker cannot do the work ({type(error).__name__}): see its log"


@contextmanager
def from_coordinator() -> Iterator[None]:
    """Attribute missing or damaged artifacts to the coordinator, in the block in which they are fetched from it."""
    try:
        yield
    except (ArtifactError, NotFound) as error:
        setattr(error, _ATTRIBUTE, Cause.COORDINATOR)
        raise


def cause_of(error: Exception) -> Cause:
    """Return whose problem an error is. An unknown error is attributed to the client's machine."""
    if isinstance(error, CannotTrain):
        return error.cause
    found: Cause | None = getattr(error, _ATTRIBUTE, None)
    if found is not None:
        return found
    return next((cause for kind, cause in _CAUSES.items() if isinstance(error, kind)), Cause.CLIENT_MACHINE)
