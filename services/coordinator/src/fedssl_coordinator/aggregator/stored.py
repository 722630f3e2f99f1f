"""Reads artifacts for computations. All bytes are compared with their digest before they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedssl.artifacts.tensors import Tensors, read_tensors
from fedssl.errors import ArtifactDamaged, ArtifactNotFound, StoreUnavailable
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.artifacts import damage

T = TypeVar("T")


def stored_tensors(digest: str, what: str) -> Tensors:
    """Return an artifact's tensors: see `fedssl.artifacts.tensors.read_tensors` for how long they are in memory.

    `what` names the artifact in errors. Raises ArtifactNotFound, ArtifactDamaged and OSError, with what to restore.
    """
    return read_stored(digest, what, lambda path: read_tensors(path, digest))


def read_stored(digest: str, what: str, read: Callable[[Path], T]) -> T:
    """Return what `read` makes of an artifact's file. `read` compares the bytes with the digest: ArtifactDamaged.

    A file that is damaged is read again, from the store itself if it was a local copy. If it is still damaged, it is
    moved aside, and is missing from then on.
    """
    try:
        try:
            return read(store().path(digest))
        except ArtifactDamaged:
            if damage.set_aside(digest):
                raise
            return read(store().path(digest))  # a copy was damaged, or another process has moved it aside
    except ArtifactDamaged as error:
        raise ArtifactDamaged(f"the {what} is damaged: {error}. {damage.what_to_do(digest)}") from error
    except ArtifactNotFound as error:
        missing = f"the {what}, artifact {digest}, is missing from the store. {damage.what_to_do(digest)}"
        raise ArtifactNotFound(missing) from error
    except StoreUnavailable:
        raise
    except OSError as error:
        error.filename = error.filename or store().place(digest)  # a failed read names no file
        raise
