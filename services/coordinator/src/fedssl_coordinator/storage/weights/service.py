"""Registers, shows and removes weights that runs may start from. The weights of a name never change."""

from sqlalchemy.orm import Session

from fedssl.artifacts.header import read_header
from fedssl.artifacts.weight_files import MAX_HEADER_BYTES, check_registered
from fedssl.protocol.views import WeightsCreate, WeightsView
from fedssl.wording import plural
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import RegisteredWeights
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.identity.projects import service as projects
from fedssl_coordinator.storage.artifacts.registration import path_of, rejections, require_uploaded
from fedssl_coordinator.storage.datasets import repository as registered


def known(session: Session, request: WeightsCreate) -> WeightsView | None:
    """Return the weights if the same ones have this name, or None if the name is free. Raises ProblemError."""
    if registered.is_taken(session, RegisteredWeights, request.name):
        return _same(session, request)
    require_uploaded(session, request.digest)
    return None


def about(digest: str) -> dict[str, int]:
    """Return the numbers of tensors and parameters in a file. Raises ProblemError.

    The file may have to be fetched, so do not call this in a transaction.
    """
    with rejections(digest), path_of(digest).open("rb") as file:
        header = read_header(file, MAX_HEADER_BYTES)
        return {"num_parameters": check_registered(header), "num_tensors": len(header.entries)}


def register(session: Session, request: WeightsCreate, numbers: dict[str, int]) -> tuple[WeightsView, bool]:
    """Register weights that were sent, and return whether they are newly registered. Raises ProblemError."""
    require_uploaded(session, request.digest)
    project = projects.chosen(session, request.project)
    row = registered.add(
        session, RegisteredWeights, **request.model_dump(exclude={"project"}), project=project, **numbers
    )
    if row is None:
        return _same(session, request), False
    message = f"weights {row.name}: {plural(row.num_tensors, 'tensor')}, {plural(row.num_parameters, 'parameter')}"
    record(session, "weights.registered", message, data={"digest": row.digest})
    return view(row), True


def view(row: RegisteredWeights) -> WeightsView:
    return WeightsView.model_validate(row, from_attributes=True)


def show(session: Session, name: str) -> WeightsView:
    """Return registered weights. Raises ProblemError if there are none of this name."""
    if (row := registered.get(session, RegisteredWeights, name)) is None:
        raise _unknown(name)
    return view(row)


def remove(session: Session, name: str) -> None:
    """Remove a name. Runs that were created with it keep its weights. Raises ProblemError if there is no such name."""
    if (digest := registered.remove(session, RegisteredWeights, name)) is None:
        raise _unknown(name)
    record(session, "weights.removed", f"weights {name}: no new run can start from them", data={"digest": digest})


def of_project(session: Session, project: str, name: str) -> WeightsView | None:
    """Return a project's weights of this name, or None if the project has none."""
    row = registered.get(session, RegisteredWeights, name)
    return view(row) if row is not None and row.project == project else None


def _same(session: Session, request: WeightsCreate) -> WeightsView:
    """Return the weights that have the name already. Raises ProblemError unless they are those of the request."""
    row = registered.get(session, RegisteredWeights, request.name)
    if row is None:
        raise ProblemError("conflict", f"the name {request.name} is taken: choose another name")
    if row.digest != request.digest or request.project not in (None, row.project):
        raise ProblemError(
            "conflict", f"{row.name} already names other weights: choose another name, or remove that one first"
        )
    return view(row)


def _unknown(name: str) -> ProblemError:
    return ProblemError("not-found", f"no weights {name}: `GET /v1/weights` lists the registered ones")
