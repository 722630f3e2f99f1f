"""Checks what a round's clients get from the coordinator, outside of any transaction: the store may be slow."""

from uuid import UUID

from fedssl.artifacts.finite import check_finite
from fedssl.errors import ArtifactError
from fedssl.methods import METHODS
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.store import store
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import repository
from fedssl_coordinator.federation.rounds.steps import CheckedInputs
from fedssl_coordinator.storage.retention.verification import fault_of


def check_inputs(run_id: UUID) -> CheckedInputs | None:
    """Return what is wrong with the round's broadcast, public images and plan, or None if no round is in progress."""
    with transaction() as session:
        run = run_rows.get(session, run_id)
        current = None if run is None else repository.unclosed(session, run_id)
    if run is None or current is None:
        return None
    spec = RunSpec.model_validate(run.spec)
    faults = []
    if (fault := fault_of(current.broadcast) or _fault_in_numbers(current.broadcast)) is not None:
        faults.append(f"the broadcast {current.broadcast} {fault}")
    if run.frozen is not None and (fault := fault_of(run.frozen)) is not None:
        faults.append(f"the frozen tensors {run.frozen} {fault}")
    digest = None if spec.public_data is None else spec.public_data.digest
    if digest is not None and (fault := fault_of(digest)) is not None:
        faults.append(f"the public images {digest} {fault}")
    if ArtifactPlan.model_validate(run.plan) != METHODS[spec.method.name].bind(spec).plan:
        faults.append("the run's artifact plan was made by another version than this coordinator's: install that one")
    return CheckedInputs(current.id, tuple(faults))


def _fault_in_numbers(digest: str) -> str | None:
    try:
        check_finite(store().path(digest))
    except ArtifactError:
        return "holds NaN or infinity"
    return None
