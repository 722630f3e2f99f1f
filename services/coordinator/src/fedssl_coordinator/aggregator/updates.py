"""Opens the accepted updates of a round for the aggregation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedssl.artifacts.tensors import Tensors, read_tensors, reread_tensors
from fedssl.errors import ArtifactDamaged, ArtifactError, ArtifactNotFound
from fedssl.methods.api import Update
from fedssl_coordinator.aggregator.stored import read_stored
from fedssl_coordinator.core.models import Assignment

_MOST_CHECKED = 10_000
_checked: dict[str, tuple[int, ...]] = {}
"""The files of updates that this process has compared with their digests: digest to version of the file."""


class UpdateLost(ArtifactError):
    """The store has lost an accepted update of the round that is being aggregated, or had other bytes in its place."""

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(f"{digest}: {reason}")
        self.digest = digest
        self.reason = reason


def stored_update(row: Assignment) -> Update:
    """Return the update of an accepted assignment. Loading it raises UpdateLost, and the errors of `read_stored`."""
    assert row.update_digest is not None, "a constraint: an accepted assignment has an update"
    assert row.num_examples is not None, "set together with the update"
    load = _LoadStored(row.update_digest)
    return Update(row.client_id, row.num_examples, load, load_again=load.again)


@dataclass(frozen=True, slots=True)
class _LoadStored:
    """Reads an update at its turn: neither memory nor a store that has to fetch it has room for those of a cohort.

    Equal digests are equal bytes.
    """

    digest: str

    def __call__(self) -> Tensors:
        return self._read(self._checked)

    def again(self) -> Tensors:
        """Return the tensors without hashing their file again, if this process has checked it and it was not
        written to since. Bytes that the disk returns differently the second time are not noticed."""
        return self._read(self._unchecked)

    def _checked(self, path: Path) -> Tensors:
        version = _version(path)  # before it is read: what is written meanwhile has another version
        tensors = read_tensors(path, self.digest)
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked[self.digest] = version
        return tensors

    def _unchecked(self, path: Path) -> Tensors:
        if _checked.get(self.digest) != _version(path):
            return self._checked(path)
        return reread_tensors(path, self.digest)

    def _read(self, read: Callable[[Path], Tensors]) -> Tensors:
        try:
            return read_stored(self.digest, "update", read)
        except ArtifactDamaged as error:
            raise UpdateLost(self.digest, "its update was damaged in the store") from error
        except ArtifactNotFound as error:
            raise UpdateLost(self.digest, "its update is missing from the store") from error


def _version(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
