"""Creates and lists projects, and chooses the one that a request is about."""

from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.projects import DEFAULT_PROJECT
from fedssl.protocol.views import ProjectView
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Project
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.project_scope import restricted_to

DEFAULT = DEFAULT_PROJECT


def create(session: Session, name: str) -> tuple[ProjectView, bool]:
    """Create a project, and return whether it is new."""
    statement = insert(Project).values(name=name).on_conflict_do_nothing().returning(Project)
    row = session.scalars(statement).one_or_none()
    if row is not None:
        record(session, "project.created", f"the project {name}")
        return view(row), True
    return view(session.get_one(Project, name)), False


def by_name(session: Session, limit: int, after: str | None) -> Sequence[Project]:
    """Return the projects that the caller may see."""
    statement = select(Project).order_by(Project.name).limit(limit)
    if after is not None:
        statement = statement.where(Project.name > after)
    return session.scalars(statement).all()


def view(row: Project) -> ProjectView:
    """Return what the API shows of a project."""
    return ProjectView.model_validate(row, from_attributes=True)


def resolved(session: Session, wanted: str | None) -> str | None:
    """Return the project that a request names, or else the caller's own, which is None for every project.

    Raises ProblemError for a project that does not exist, or that the caller may not see.
    """
    if wanted is None:
        return restricted_to()
    if session.get(Project, wanted) is None:
        raise not_found(wanted)
    return wanted


def chosen(session: Session, wanted: str | None) -> str:
    """Return the project that a request is about: the default one, unless it or its caller has another."""
    return resolved(session, wanted) or DEFAULT


def require_all(session: Session, names: Mapping[str, str]) -> None:
    """Raise ProblemError if one of the projects does not exist."""
    for name in names:
        if session.get(Project, name) is None:
            raise not_found(name)


def not_found(name: str) -> ProblemError:
    """Return the error for a project that does not exist, as far as the caller may know."""
    return ProblemError("not-found", f"no project {name}: `GET /v1/projects` lists yours; an admin may create one")
