"""`/clients`: the clients, what each has sent, and their revocation."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from sqlalchemy.orm import Session
from starlette.responses import Response

from fedssl.protocol.base import ClientId
from fedssl.protocol.data_card import SIZE_BOUNDS
from fedssl.protocol.validation import first_problem
from fedssl.protocol.views import ClientEdit
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.paging import Cursor, decode_cursor, encode_cursor
from fedssl_coordinator.dashboard.layout.mistakes import NO_MISTAKE, Mistake
from fedssl_coordinator.dashboard.layout.page import PageRoute, data, render, see_other
from fedssl_coordinator.dashboard.run import member_queries, site_queries
from fedssl_coordinator.dashboard.session import Form, MayRevoke, Revoking, Steering, Viewing, Visitor
from fedssl_coordinator.federation.clients import service
from fedssl_coordinator.federation.data_reports import service as data_reports
from fedssl_coordinator.federation.ledger_anchors import repository as anchors

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE = 100
_DAYS = 42
_RUNS = 20
_RIBBON = 90
_LEDGER = 50
_LETTERS = {"accepted": "a", "expired": "p", "rejected": "f", "declined": "s"}

Text = Annotated[str, Query(max_length=100)]
After = Annotated[str, Query(max_length=64)]


@router.get("/clients")
def list_clients(request: Request, visitor: Viewing, session: DB, q: Text = "", after: After = "") -> Response:
    """Show the next hundred clients whose names contain `q`, by name."""
    text = q.strip().replace("\x00", "")
    rows = member_queries.clients(session, after=after.replace("\x00", ""), text=text, limit=PAGE + 1)
    shown = rows[:PAGE]
    sent = member_queries.sent_by_client(session, [row.client.id for row in shown])
    context: dict[str, Any] = {
        "rows": shown,
        "sent": sent,
        "q": q,
        "more": shown[-1].client.id if len(rows) > PAGE else None,
    }
    template = "clients_table.html" if request.headers.get("hx-target") == "list" else "clients.html"
    return render(template, visitor, is_first=not after, **context)


@router.get("/clients/{client_id}")
def show_client(client_id: ClientId, visitor: Viewing, session: DB, cursor: Cursor = None) -> Response:
    """Show a client: what it sent in the runs that are kept, its machine, its part in each run, and its artifacts."""
    return _page(visitor, session, client_id, cursor)


def _page(
    visitor: Visitor,
    session: Session,
    client_id: str,
    cursor: str | None = None,
    *,
    shown_as: str | None = None,
    wrong: Mistake = NO_MISTAKE,
) -> Response:
    client = service.show(session, client_id)
    before = decode_cursor(cursor, datetime.fromisoformat)[0] if cursor else None
    runs = member_queries.sent_by_run(session, client_id, _RUNS)
    parts = member_queries.outcomes_of(session, client_id, [row.run.id for row in runs], _RIBBON)
    ribbons = {run_id: "".join(_LETTERS.get(state, "d") for state in states) for run_id, states in parts.items()}
    ledger = member_queries.sendings(session, client_id, _LEDGER + 1, before)
    [known] = member_queries.clients(session, only=client_id)
    count, total = member_queries.sent_by_client(session, [client_id]).get(client_id, (0, 0))
    return render(
        "client.html", visitor, status=422 if wrong.text else 200, wrong=wrong,
        shown_as=client.display_name if shown_as is None else shown_as,
        client=client, known=known, runs=runs, ribbons=ribbons, ledger=ledger[:_LEDGER],
        more=encode_cursor(ledger[_LEDGER - 1].at.isoformat()) if len(ledger) > _LEDGER else None,
        is_first=cursor is None, site=data_reports.show_site(session, client_id, client.project),
        size_bounds=SIZE_BOUNDS,
        anchor=anchors.newest(session, client_id), live=member_queries.live_parts(session, client_id), count=count,
        total=total, num_runs=member_queries.num_runs(session, client_id),
        num_counted=site_queries.num_counted(session, client_id),
    )  # fmt: skip


@router.get("/clients/{client_id}/bytes.json")
def show_bytes(client_id: ClientId, request: Request, visitor: Viewing, session: DB) -> Response:
    """Return the bytes sent on each of the last days."""
    service.show(session, client_id)
    days = member_queries.bytes_by_day(session, client_id, _DAYS)
    return data(request, {"days": [day for day, _ in days], "bytes": [total for _, total in days]})


@router.post("/clients/{client_id}/rename")
def rename(client_id: ClientId, visitor: Steering, form: Form, session: DB) -> Response:
    """Change the client's display name."""
    name = form.get("display_name", "")
    try:
        request = ClientEdit(display_name=name)
    except ValidationError as error:
        wrong = Mistake("display_name", f"Nothing was changed: {first_problem(error).message}.")
        return _page(visitor, session, client_id, shown_as=name, wrong=wrong)
    service.edit(session, client_id, request)
    return see_other(f"/clients/{client_id}")


@router.get("/clients/{client_id}/revoke/confirm")
def ask(client_id: ClientId, visitor: MayRevoke, session: DB) -> Response:
    """Show the dialog's question as a page of its own."""
    return _question(visitor, session, client_id, NO_MISTAKE)


@router.post("/clients/{client_id}/revoke")
def revoke(client_id: ClientId, visitor: Revoking, form: Form, session: DB) -> Response:
    """Revoke a client, if its name was typed."""
    if form.get("name") != client_id:
        wrong = Mistake("name", f"Nothing was changed. To revoke the client, type its name: {client_id}")
        return _question(visitor, session, client_id, wrong)
    service.revoke(session, client_id)
    return see_other(f"/clients/{client_id}")


def _question(visitor: Visitor, session: DB, client_id: str, wrong: Mistake) -> Response:
    live, client = member_queries.live_parts(session, client_id), service.show(session, client_id)
    status = 422 if wrong.text else 200
    return render("confirm_revoke.html", visitor, status=status, client=client, live=live, wrong=wrong)
