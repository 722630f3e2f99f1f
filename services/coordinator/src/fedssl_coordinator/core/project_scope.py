"""Restricts what a request can read and change to its caller's project, in one place: each query of the ORM.

Authentication calls `restrict`. From then on every SELECT, UPDATE and DELETE of the request finds only rows of that
project, so rows of other projects look as if they did not exist. Workers, aggregators and the scheduler are not
restricted: a run offers work only to clients of its own project.
"""

import functools
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, event, select
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria
from sqlalchemy.orm.util import LoaderCriteriaOption
from starlette.types import ASGIApp, Receive, Scope, Send

from fedssl_coordinator.core.models import (
    Assignment,
    Client,
    DataReport,
    DimensionAssignment,
    DistillationJob,
    Evaluation,
    EvaluationDataset,
    Event,
    LedgerAnchor,
    Metric,
    NotificationDelivery,
    NotificationDestination,
    Project,
    PublicDataset,
    RegisteredWeights,
    Round,
    Run,
    SecureMember,
    SecureRound,
    SiteEvaluation,
    Token,
)

UNRESTRICTED = "fedssl_unrestricted"
"""An execution option of statements whose result is not for the caller, such as whom to notify of an event."""


@dataclass(slots=True)
class _Restriction:
    """A request's project. Mutable, because authentication runs in a thread with a copy of the request's context."""

    project: str | None = None


_restriction: ContextVar[_Restriction | None] = ContextVar("restriction", default=None)


class ProjectScope:
    """ASGI middleware that gives each request its own restriction."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
        token = _restriction.set(_Restriction())
        try:
            await self._app(scope, receive, send)
        finally:
            _restriction.reset(token)


def restrict(project: str | None) -> None:
    """Restrict the current request to a project, or to none if its caller may see every project."""
    restriction = _restriction.get()
    if restriction is not None:
        restriction.project = project
    elif project is not None:
        raise RuntimeError("only a request can be restricted to a project")


def restricted_to() -> str | None:
    """Return the project to which the current request is restricted, if it is."""
    restriction = _restriction.get()
    return None if restriction is None else restriction.project


@event.listens_for(Session, "do_orm_execute")
def _restrict(state: ORMExecuteState) -> None:
    project = restricted_to()
    if project is None or state.is_column_load or state.execution_options.get(UNRESTRICTED):
        return
    if state.is_select or state.is_update or state.is_delete:
        state.statement = state.statement.options(*_criteria(project))


@functools.lru_cache(maxsize=1000)
def _criteria(project: str) -> tuple[LoaderCriteriaOption, ...]:
    runs = select(Run.id).where(Run.project == project)
    clients = select(Client.id).where(Client.project == project)
    rounds = select(Round.id).where(Round.run_id.in_(runs))
    destinations = select(NotificationDestination.id).where(NotificationDestination.project == project)
    conditions: dict[type[Any], ColumnElement[bool]] = {
        Project: Project.name == project,
        DataReport: DataReport.client_id.in_(clients),
        LedgerAnchor: LedgerAnchor.client_id.in_(clients),
        SecureMember: SecureMember.round_id.in_(rounds),
        SecureRound: SecureRound.round_id.in_(rounds),
        Token: (Token.project == project) | Token.client_id.in_(clients),
        Event: Event.run_id.in_(runs) | (Event.run_id.is_(None) & Event.client_id.in_(clients)),
        NotificationDelivery: NotificationDelivery.destination_id.in_(destinations),
    }
    for table in (Run, Client, PublicDataset, EvaluationDataset, RegisteredWeights, NotificationDestination):
        conditions[table] = table.project == project
    for part in (Round, Assignment, DimensionAssignment, DistillationJob, Evaluation, SiteEvaluation, Metric):
        conditions[part] = part.run_id.in_(runs)
    return tuple(
        with_loader_criteria(table, condition, include_aliases=True) for table, condition in conditions.items()
    )
