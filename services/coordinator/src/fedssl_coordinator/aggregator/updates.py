"""Opens the accepted updates of a round for the aggregation."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedssl.artifacts.tensors import FileTensors, Tensors, read_tensors
from fedssl.errors import ArtifactDamaged, ArtifactError, ArtifactNotFound
from fedssl.methods.api import Update
from fedssl_coordinator.aggregator.stored import read_stored
from fedssl_coordinator.core.models import Assignment

T = TypeVar("T")

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
    return Update(row.client_id, row.num_examples, load, reopen=load.reopen)


@dataclass(frozen=True, slots=True)
class _LoadStored:
    """Reads an update when it is needed: neither memory nor the local copies of a store have room for a whole cohort's.

    Equal digests are equal bytes.
    """

    digest: str

    def __call__(self) -> Tensors:
        return self._read(self._checked)

    @contextmanager
    def reopen(self) -> Iterator[FileTensors | None]:
        """Open the update's file without hashing it again, if this process has checked it and it was not written to
        since; otherwise give None. Bytes that the disk returns differently the second time are not noticed."""
        with self._read(lambda path: path.open("rb", buffering=0)) as file:
            yield FileTensors(file) if _checked.get(self.digest) == _version(os.fstat(file.fileno())) else None

    def _checked(self, path: Path) -> Tensors:
        version = _version(path.stat())  # before it is read: a file that is written meanwhile has another version
        tensors = read_tensors(path, self.digest)
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked[self.digest] = version
        return tensors

    def _read(self, read: Callable[[Path], T]) -> T:
        try:
            return read_stored(self.digest, "update", read)
        except ArtifactDamaged as error:
            raise UpdateLost(self.digest, "its update was damaged in the store") from error
        except ArtifactNotFound as error:
            raise UpdateLost(self.digest, "its update is missing from the store") from error


def _version(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
