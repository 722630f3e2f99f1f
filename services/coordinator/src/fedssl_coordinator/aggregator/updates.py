"""Opens the accepted updates of a round for the aggregation."""

from dataclasses import dataclass

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import ArtifactDamaged, ArtifactError, ArtifactNotFound
from fedssl.methods.api import Update
from fedssl_coordinator.aggregator.stored import stored_tensors
from fedssl_coordinator.core.models import Assignment


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
    return Update(row.client_id, row.num_examples, _LoadStored(row.update_digest))


@dataclass(frozen=True, slots=True)
class _LoadStored:
    """Reads an update at its turn: neither memory nor a store that has to fetch it has room for those of a cohort.

    Equal digests are equal bytes.
    """

    digest: str

    def __call__(self) -> Tensors:
        try:
            return stored_tensors(self.digest, "update")
        except ArtifactDamaged as error:
            raise UpdateLost(self.digest, "its update was damaged in the store") from error
        except ArtifactNotFound as error:
            raise UpdateLost(self.digest, "its update is missing from the store") from error
