"""The registration of data sets and weights: a file that was sent as an artifact gets a name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.orm import Session

from fedssl.errors import ArtifactError, ArtifactNotFound
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.artifacts import repository
from fedssl_coordinator.storage.artifacts.damage import set_aside
from fedssl_coordinator.storage.artifacts.service import is_of_project


@contextmanager
def rejections(digest: str) -> Iterator[None]:
    """Turn errors about bytes of another kind, or other bytes than were sent, into problems for the caller."""
    try:
        yield
    except ArtifactError as error:
        if set_aside(digest):
            raise not_uploaded(digest) from None
        raise ProblemError("artifact-rejected", str(error)) from None


def path_of(digest: str) -> Path:
    """Return the path of a file that was sent. Raises ProblemError. It may have to be fetched."""
    try:
        return store().path(digest)
    except ArtifactNotFound:
        raise not_uploaded(digest) from None


def require_uploaded(session: Session, digest: str) -> None:
    """Raise ProblemError unless the file is stored, and was sent by the caller's project.

    If it is stored, it stays until the transaction ends.
    """
    if not repository.hold(session, digest) or not is_of_project(session, digest):
        raise not_uploaded(digest)


def not_uploaded(digest: str) -> ProblemError:
    """Return the error for a file that was not sent."""
    return ProblemError("not-found", f"no artifact {digest} has been uploaded: PUT it to /v1/artifacts first")
