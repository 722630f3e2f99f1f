"""Reads and writes the reports of clients about their images."""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.data_card import DataReport
from fedssl_coordinator.core.models import Client
from fedssl_coordinator.core.models import DataReport as Row


def put(session: Session, client_id: str, report: DataReport) -> None:
    """Store a client's report in place of its last one."""
    values = {"report": report.model_dump(mode="json"), "reported_at": func.now()}
    statement = insert(Row).values(client_id=client_id, **values)
    session.execute(statement.on_conflict_do_update(index_elements=[Row.client_id], set_=values))


def all_of(session: Session, project: str) -> Sequence[Row]:
    """Return the reports of a project's clients that are not revoked, by client."""
    statement = select(Row).join(Client, Client.id == Row.client_id)
    statement = statement.where(Client.project == project, Client.revoked_at.is_(None)).order_by(Row.client_id)
    return session.scalars(statement, execution_options={"populate_existing": True}).all()


def histograms(session: Session, project: str) -> dict[str, tuple[float | None, ...]]:
    """Return the histograms that a project's clients, except the revoked ones, have reported, in their names' order."""
    histogram = Row.report["card"]["histogram"]
    statement = select(Row.client_id, histogram).join(Client, Client.id == Row.client_id).order_by(Row.client_id)
    statement = statement.where(Client.project == project, Client.revoked_at.is_(None), histogram.is_not(None))
    return {client_id: tuple(values) for client_id, values in session.execute(statement)}
